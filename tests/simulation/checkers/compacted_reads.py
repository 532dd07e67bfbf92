"""Reads of compacted topics through brokers, while records are written, compacted and expire.

Each record has a number in a header, as in the chaos runs, and the rules are theirs (``chaos/compaction/verdict.py``): what a
reader may pass over, and which record of a key is the last. Here a reader of committed records may also see a record only after
its transaction's commit was asked for, and each response leads its reader on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from chaos.compaction.readings import Gap, Readings, Seen
from chaos.compaction.sends import NUMBER, Place, Send
from chaos.compaction.verdict import Passed, wrong_identities, wrong_last_records
from chaos.outcomes import State as SendState

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import COMPACTED_AWAY, READ_IN_A_GAP, Coverage
from simulation.checkers.transaction_outcomes import Outcome, State
from simulation.clients.kafka import Fetched
from stratalog_core.batches.records import Record

_SHOWN: Final = 3
_FINAL: Final[Mapping[State, SendState]] = {
    State.COMMITTED: SendState.COMMITTED, State.ABORTED: SendState.ABORTED, State.UNKNOWN: SendState.UNKNOWN
}  # fmt: skip


class CompactedReads:
    """All records of the topics of one run, and all reads of them. ``now_s`` is simulated time."""

    def __init__(self, audit: Audit, coverage: Coverage, now_s: Callable[[], float]) -> None:
        self._audit = audit
        self._coverage = coverage
        self._now_s = now_s
        self._sends: list[Send] = []
        self._outcomes: list[Outcome | None] = []
        """By number: the record's transaction; None: it belongs to none."""
        self._readings = {True: Readings(), False: Readings()}
        """Those of readers of committed records, and those of others."""

    @property
    def sent(self) -> int:
        return len(self._sends)

    def begin(self, place: Place, key: bytes, outcome: Outcome | None, *, is_tombstone: bool) -> Send:
        """Note a record that is about to be sent. Records of a key come from one producer, in order."""
        number = len(self._sends)
        send = Send(number=number, place=place, key=key, is_tombstone=is_tombstone, invoked_s=self._now_s())
        self._sends.append(send)
        self._outcomes.append(outcome)
        return send

    def acknowledge(self, sends: Sequence[Send], base_offset: int) -> None:
        """Note the offsets of a batch that was acknowledged."""
        for offset, send in enumerate(sends, base_offset):
            send.offset = offset

    def read(self, place: Place, offset: int, fetched: Fetched, *, is_committed: bool) -> list[Seen]:
        """Check the response to a fetch from ``offset`` on; return its records."""
        moment_s, name = self._now_s(), f"{place[0]}-{place[1]}@{offset}"
        has_batches = fetched.first_offset >= 0
        goes_on = fetched.next_offset > offset or not has_batches
        self._audit.require(goes_on, f"a fetch from {name} gets batches from {fetched.first_offset}, which end before it")
        self._coverage.meet(READ_IN_A_GAP, has_batches and fetched.first_offset > offset)
        found, before = list[Seen](), offset - 1
        for record in fetched.records:
            seen = _seen(record)
            if is_committed:
                self._check_committed(place, seen)
            self._readings[is_committed].note(place, before, seen, moment_s)
            found.append(seen)
            before = seen.offset
        if fetched.next_offset > before + 1:
            gap = Gap(place=place, before=before, after=fetched.next_offset, moment_s=moment_s)
            self._readings[is_committed].note_gap(gap)
        return found

    def _check_committed(self, place: Place, seen: Seen) -> None:
        outcome = self._outcomes[seen.number] if 0 <= seen.number < len(self._outcomes) else None
        may_be_read = outcome is None or outcome.state.may_be_read
        if outcome is not None and not may_be_read:
            name = f"{outcome.writer}/{outcome.number}"
            what = f"number {seen.number} at {place[0]}-{place[1]}@{seen.offset}"
            self._audit.require(False, f"{what} was read as committed; its transaction {name} is {outcome.state.value}")

    def check_final(
        self,
        committed: Mapping[Place, Sequence[Seen]],
        uncommitted: Mapping[Place, Sequence[Seen]],
        starts: Mapping[Place, int],
    ) -> None:
        """Judge all reads. The arguments are the last ones, of everything, after all was compacted, and each log's start."""
        self._decide()
        passed = Passed(self._sends)
        problems = [*self._problems(passed, True, committed, starts), *self._problems(passed, False, uncommitted, starts)]
        assert not problems, "; ".join(problems)
        self._coverage.meet(COMPACTED_AWAY, passed.compacted(self._readings[True].gaps()).total())

    def _decide(self) -> None:
        """Give each record its final state. A transaction of unknown outcome was committed if any of its records was read."""
        read = {seen.number for seen in self._readings[True].records().values()}
        committed = {id(self._outcomes[number]) for number in read if 0 <= number < len(self._sends)}
        for send, outcome in zip(self._sends, self._outcomes, strict=True):
            if outcome is None or (outcome.state is State.UNKNOWN and id(outcome) in committed):
                send.state = SendState.COMMITTED
            else:
                send.state = _FINAL[outcome.state]

    def _problems(
        self, passed: Passed, is_committed: bool, last: Mapping[Place, Sequence[Seen]], starts: Mapping[Place, int]
    ) -> Iterator[str]:
        readings = self._readings[is_committed]
        records = {
            at: seen for at, seen in readings.records().items() if is_committed or not self._is_aborted(seen)
        }  # fmt: skip
        kinds = (
            readings.problems(),
            wrong_identities(self._sends, records),
            wrong_last_records(self._sends, last, starts, is_compacted=True, is_quick=True),
            passed.wrong(readings.gaps(), starts),
        )
        for kind in kinds:
            yield from islice(kind, _SHOWN)

    def _is_aborted(self, seen: Seen) -> bool:
        return 0 <= seen.number < len(self._sends) and self._sends[seen.number].state is SendState.ABORTED


def _seen(record: Record) -> Seen:
    number = dict(record.headers).get(NUMBER) or b"-1"
    return Seen(offset=record.offset, number=int(number), key=record.key, value=record.value)
