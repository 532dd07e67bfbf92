"""Checks a history: finds operations that are impossible on a correct log.

One pass over the operations, then one over the collected facts; memory grows with the records, not with the polls. Unknown
outcomes (``info``) may have taken effect or not, at any time after they were invoked: they are never lost and never aborted.

| anomaly | meaning |
| --- | --- |
| ``lost`` | acknowledged, but readers went past its offset without it |
| ``unseen`` | acknowledged, but no reader read that far |
| ``inconsistent`` | two values at one offset |
| ``duplicate`` | one value of an idempotent producer at two offsets |
| ``reordered`` | acknowledged sends of one idempotent producer are in another order than they were sent |
| ``nonmonotonic-send`` | acknowledged at a lower offset than a record acknowledged before it was sent |
| ``poll-skip``, ``nonmonotonic-poll`` | two polls of one reader that omit a known record between them, or go back |
| ``int-poll-skip``, ``int-nonmonotonic-poll`` | the same within one poll |
| ``group-skip`` | a consumer group as a whole omitted a known record |
| ``lost-commit`` | a member started before its group's committed offset |
| ``aborted-read`` | the value of a send that certainly failed |
| ``phantom`` | a value that no client sent there |
| ``corrupt`` | a record with other bytes than were sent |

An idempotent librdkafka producer starts a new epoch when one of its records timed out, and when a leader refuses a request
because the last leader got the one before it, as Kafka does (confluentinc/librdkafka#4953). It resends the batches in flight to
all partitions in that epoch, where no broker can recognise them (KIP-360): the client causes such duplicates, so they are only
noted. Duplicates after a new epoch for another reason, and those of Java's producer, are anomalies.

Source of the anomalies: Jepsen's Kafka workload; lost commits, corruption and the order in real time are ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from chaos.history import CORRUPT, Operation, Pair

EXAMPLES_MAX = 20
_OWN_REASONS = ("timed out", "skipped sequence numbers")
"""Parts of librdkafka's reasons for new epochs that the client itself causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One violation. ``operations`` are the indexes of the operations that show it."""

    kind: str
    key: int
    detail: str
    operations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``counts`` of all anomalies by kind, and the first examples of each; ``notes`` count remarkable but allowed events."""

    counts: dict[str, int]
    examples: tuple[Anomaly, ...]
    notes: dict[str, int]

    @property
    def is_clean(self) -> bool:
        return not self.counts


@dataclass(slots=True, kw_only=True)
class _Send:
    value: int
    client: str
    idempotent: bool
    invoked: int
    acknowledged_before: int
    """Highest offset of its key that was acknowledged before it was sent."""
    outcome: str = "info"
    completed: int = -1
    offset: int | None = None


@dataclass(slots=True)
class _Log:
    """The known values, offsets and sends of one key."""

    values: dict[int, int] = field(default_factory=dict)
    seen_in: dict[int, int] = field(default_factory=dict)
    """By offset, the operation that showed its value first."""
    offsets: dict[int, int] = field(default_factory=dict)
    """By value, the first offset at which it was seen."""
    polled: set[int] = field(default_factory=set)
    sends: dict[int, _Send] = field(default_factory=dict)
    acknowledged: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """A reader went from ``before`` to ``after``; an anomaly if a record is known between them."""

    kind: str
    key: int
    before: int
    after: int
    operation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Duplicate:
    key: int
    value: int
    offsets: Pair
    operations: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commit:
    offset: int
    completed: int


@dataclass(slots=True)
class _Group:
    polled: dict[int, set[int]] = field(default_factory=dict)
    commits: dict[int, list[_Commit]] = field(default_factory=dict)
    """By key, the commits that may have been the last: concurrent commits take effect in any order."""


class Checker:
    """Checks a history. Call ``add`` for each operation in order, then ``finish`` once."""

    def __init__(self) -> None:
        self._logs: dict[int, _Log] = {}
        self._positions: dict[tuple[int, int], int] = {}
        self._groups: dict[str, _Group] = {}
        self._floors: dict[tuple[int, int], int] = {}
        """By process and key: the offset that its group had committed when it was assigned."""
        self._committing: dict[tuple[int, int, int], int] = {}
        """By process, key and offset, the operation that started a commit."""
        self._gaps: list[_Gap] = []
        self._duplicates: list[_Duplicate] = []
        self._epochs: dict[str, list[tuple[int, str]]] = {}
        """By client, the operations with which it started a new producer epoch, and why."""
        self._counts: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._examples: list[Anomaly] = []

    def add(self, operation: Operation) -> None:
        """Process the next operation."""
        if operation.f == "send":
            self._send(operation)
        elif operation.f == "poll" and operation.polled:
            for key, pairs in operation.polled.items():
                self._poll(operation, key, pairs)
        elif operation.f in ("assign", "subscribe", "rebalance") and operation.type != "fail":
            self._assign(operation)
        elif operation.f == "commit":
            self._commit(operation)
        elif operation.f == "epoch":
            self._epochs.setdefault(operation.client, []).append((operation.index, operation.error))

    def finish(self) -> Verdict:
        """Return the verdict on all operations."""
        for gap in self._gaps:
            self._check_gap(gap)
        for duplicate in self._duplicates:
            self._check_duplicate(duplicate)
        for key, log in self._logs.items():
            self._check_reads(key, log)
            self._check_sends(key, log)
            self._check_order(key, log)
        for group in self._groups.values():
            self._check_group(group)
        return Verdict(counts=dict(self._counts), examples=tuple(self._examples), notes=dict(self._notes))

    # -- during the operations

    def _log(self, key: int) -> _Log:
        return self._logs.setdefault(key, _Log())

    def _send(self, operation: Operation) -> None:
        assert operation.key is not None
        assert operation.value is not None
        log = self._log(operation.key)
        if operation.type == "invoke":
            log.sends[operation.value] = _Send(
                value=operation.value,
                client=operation.client,
                idempotent=operation.idempotent,
                invoked=operation.index,
                acknowledged_before=log.acknowledged,
            )
            return
        send = log.sends[operation.value]
        send.outcome, send.completed, send.offset = operation.type, operation.index, operation.offset
        if operation.type == "ok" and operation.offset is not None:
            self._acknowledged(operation.key, log, send, operation.offset)

    def _acknowledged(self, key: int, log: _Log, send: _Send, offset: int) -> None:
        if offset <= send.acknowledged_before:
            detail = (
                f"value {send.value} acknowledged at {offset}; {send.acknowledged_before} was acknowledged before it was sent"
            )
            self._anomaly("nonmonotonic-send", key, detail, send.invoked, send.completed)
        log.acknowledged = max(log.acknowledged, offset)
        self._observe(key, log, offset, send.value, send.completed)

    def _observe(self, key: int, log: _Log, offset: int, value: int, operation: int) -> None:
        known = log.values.setdefault(offset, value)
        first = log.seen_in.setdefault(offset, operation)
        if known != value:
            self._anomaly("inconsistent", key, f"values {known} and {value} at offset {offset}", first, operation)
            return
        other = log.offsets.setdefault(value, offset)
        if other != offset and first == operation:
            operations = (log.seen_in[other], operation)
            self._duplicates.append(_Duplicate(key=key, value=value, offsets=(other, offset), operations=operations))

    def _poll(self, operation: Operation, key: int, pairs: Sequence[Pair]) -> None:
        log, reader = self._log(key), (operation.process, key)
        group = self._groups.setdefault(operation.group, _Group()).polled.setdefault(key, set()) if operation.group else None
        before, prefix = self._positions.get(reader), ""
        self._check_start(operation, key, pairs)
        for offset, value in pairs:
            self._step(operation.index, key, before, offset, prefix)
            if value == CORRUPT:
                self._anomaly("corrupt", key, f"the record at offset {offset} is not what was sent", operation.index)
            else:
                self._observe(key, log, offset, value, operation.index)
            log.polled.add(offset)
            if group is not None:
                group.add(offset)
            before, prefix = offset, "int-"
        if before is not None:
            self._positions[reader] = before

    def _step(self, operation: int, key: int, before: int | None, after: int, prefix: str) -> None:
        if before is None:
            return
        if after <= before:
            self._anomaly(f"{prefix}nonmonotonic-poll", key, f"offset {after} after {before}", operation)
        elif after > before + 1:
            self._gaps.append(_Gap(kind=f"{prefix}poll-skip", key=key, before=before, after=after, operation=operation))

    def _check_start(self, operation: Operation, key: int, pairs: Sequence[Pair]) -> None:
        floor = self._floors.pop((operation.process, key), None)
        if floor is not None and pairs and pairs[0][0] < floor:
            self._anomaly("lost-commit", key, f"started at {pairs[0][0]}, although {floor} had been committed", operation.index)

    def _assign(self, operation: Operation) -> None:
        for reader in [reader for reader in self._positions if reader[0] == operation.process]:
            del self._positions[reader]
        for reader in [reader for reader in self._floors if reader[0] == operation.process]:
            del self._floors[reader]
        if operation.group and operation.f == "rebalance":
            commits = self._groups.setdefault(operation.group, _Group()).commits
            for key in commits.keys() & set(operation.keys):
                self._floors[(operation.process, key)] = min(commit.offset for commit in commits[key])

    def _commit(self, operation: Operation) -> None:
        commits = self._groups.setdefault(operation.group, _Group()).commits
        for key, offset in (operation.committed or {}).items():
            place = (operation.process, key, offset)
            if operation.type == "invoke":
                self._committing[place] = operation.index
                continue
            invoked = self._committing.pop(place, operation.index)
            if operation.type == "ok":
                together = [commit for commit in commits.get(key, ()) if commit.completed > invoked]
                commits[key] = [*together, _Commit(offset=offset, completed=operation.index)]

    # -- at the end

    def _check_gap(self, gap: _Gap) -> None:
        values = self._log(gap.key).values
        missing = [offset for offset in range(gap.before + 1, gap.after) if offset in values]
        if missing:
            detail = f"from {gap.before} to {gap.after}, without {len(missing)} known records from {missing[0]} on"
            self._anomaly(gap.kind, gap.key, detail, gap.operation)

    def _check_duplicate(self, found: _Duplicate) -> None:
        send = self._log(found.key).sends.get(found.value)
        reasons = [] if send is None else self._reasons_of_epochs_during(send)
        if send is not None and not send.idempotent:
            self._notes["duplicates of producers without idempotence"] += 1
        elif any(own in reason for reason in reasons for own in _OWN_REASONS):
            self._notes["duplicates by a producer's new epoch"] += 1
        else:
            epochs = "".join(f"; its producer started an epoch: {reason}" for reason in reasons)
            detail = f"value {found.value} at offsets {found.offsets[0]} and {found.offsets[1]}{epochs}"
            self._anomaly("duplicate", found.key, detail, *found.operations)

    def _reasons_of_epochs_during(self, send: _Send) -> list[str]:
        epochs = self._epochs.get(send.client, [])
        following = epochs[bisect_right(epochs, send.invoked, key=itemgetter(0)) :]
        return [reason for index, reason in following if send.completed < 0 or index <= send.completed]

    def _check_reads(self, key: int, log: _Log) -> None:
        for offset in sorted(log.polled):
            value = log.values.get(offset)
            if value is None:
                continue
            send = log.sends.get(value)
            if send is None:
                self._anomaly("phantom", key, f"value {value} at {offset} was never sent there", log.seen_in[offset])
            elif send.outcome == "fail":
                detail = f"value {value} at {offset} was read, although its send had failed"
                self._anomaly("aborted-read", key, detail, send.completed, log.seen_in[offset])
            elif send.outcome == "info":
                self._notes["unknown sends that took effect"] += 1

    def _check_sends(self, key: int, log: _Log) -> None:
        highest = max(log.polled, default=-1)
        for send in log.sends.values():
            if send.outcome != "ok" or send.offset is None or send.offset in log.polled:
                continue
            kind = "lost" if send.offset <= highest else "unseen"
            detail = f"value {send.value}, acknowledged at {send.offset}; readers reached {highest}"
            self._anomaly(kind, key, detail, send.invoked, send.completed)

    def _check_order(self, key: int, log: _Log) -> None:
        last: dict[str, _Send] = {}
        for send in log.sends.values():
            if not send.idempotent or send.outcome != "ok" or send.offset is None:
                continue
            earlier = last.get(send.client)
            if earlier is not None and earlier.offset is not None and send.offset < earlier.offset:
                detail = f"{send.client} sent {earlier.value} before {send.value}: offsets {earlier.offset}, {send.offset}"
                self._anomaly("reordered", key, detail, earlier.completed, send.completed)
            last[send.client] = send

    def _check_group(self, group: _Group) -> None:
        for key, polled in group.polled.items():
            log, highest = self._log(key), max(polled)
            missing = sorted(offset for offset in log.values if offset < highest and offset not in polled)
            if missing:
                detail = f"read up to {highest} without {len(missing)} known records from {missing[0]} on"
                self._anomaly("group-skip", key, detail, log.seen_in[missing[0]])

    def _anomaly(self, kind: str, key: int, detail: str, *operations: int) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= EXAMPLES_MAX:
            self._examples.append(Anomaly(kind=kind, key=key, detail=detail, operations=operations))


def check(operations: Iterable[Operation]) -> Verdict:
    """Return the verdict on a whole history."""
    checker = Checker()
    for operation in operations:
        checker.add(operation)
    return checker.finish()


def offending(verdict: Verdict, operations: Iterable[Operation]) -> Iterator[Operation]:
    """Return the operations that the examples name."""
    wanted = {index for anomaly in verdict.examples for index in anomaly.operations}
    return (operation for operation in operations if operation.index in wanted)
