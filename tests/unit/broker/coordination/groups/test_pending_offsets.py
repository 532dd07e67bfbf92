"""Offsets of transactions in a group coordinator's state: a commit marker makes them effective, in the order of records."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.coordination.groups.core.records import (
    CommittedOffset,
    OffsetKey,
    encode_offset_key,
    encode_offset_value,
)
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.replay import Replay
from stratalog_core.batches.batch import CONTROL_BIT, NO_PRODUCER_ID, TRANSACTIONAL_BIT
from stratalog_core.batches.records import Record, build_batch

GROUP = "group"
Name = tuple[str, int]
A, B = ("a", 0), ("b", 1)


class Log:
    """A partition of ``__consumer_offsets``: each call appends a batch, which is applied."""

    def __init__(self, store: GroupStore | None = None) -> None:
        self.store = store or GroupStore()
        self._replay = Replay(self.store)

    def commit(self, name: Name, offset: int, producer_id: int = NO_PRODUCER_ID) -> None:
        committed = CommittedOffset(offset=offset, leader_epoch=-1, metadata="", committed_at_ms=0)
        self._append(name, encode_offset_value(committed), producer_id)

    def delete(self, name: Name) -> None:
        self._append(name, None, NO_PRODUCER_ID)

    def _append(self, name: Name, value: bytes | None, producer_id: int) -> None:
        record = Record(offset=0, timestamp_ms=0, key=encode_offset_key(OffsetKey(GROUP, *name)), value=value)
        attributes = TRANSACTIONAL_BIT if producer_id != NO_PRODUCER_ID else 0
        self._replay.apply(build_batch([record], attributes=attributes, producer_id=producer_id, producer_epoch=0))

    def end(self, producer_id: int, *, commit: bool) -> None:
        key, value = bytes((0, 0, 0, int(commit))), bytes(6)
        marker = Record(offset=0, timestamp_ms=0, key=key, value=value)
        attributes = TRANSACTIONAL_BIT | CONTROL_BIT
        self._replay.apply(build_batch([marker], attributes=attributes, producer_id=producer_id, producer_epoch=0))

    @property
    def offsets(self) -> dict[Name, int]:
        return {name: committed.offset for name, committed in self.store.offsets_of(GROUP).items()}

    @property
    def pending(self) -> set[Name]:
        return self.store.pending.names_of(GROUP)

    def moved(self) -> Log:
        """The same state at the next owner of the partition."""
        return Log(GroupStore.from_snapshot(self.store.snapshot()))


def test_offsets_of_a_transaction_take_effect_with_its_commit() -> None:
    log = Log()
    log.commit(A, 1)
    log.commit(A, 5, producer_id=7)
    log.commit(B, 6, producer_id=7)
    assert (log.offsets, log.pending) == ({A: 1}, {A, B})
    log.end(7, commit=True)
    assert (log.offsets, log.pending) == ({A: 5, B: 6}, set())
    assert log.store.offset_count == 2


def test_offsets_of_a_transaction_are_dropped_with_its_abort() -> None:
    log = Log()
    log.commit(A, 1)
    log.commit(A, 5, producer_id=7)
    log.end(7, commit=False)
    assert (log.offsets, log.pending) == ({A: 1}, set())
    log.end(7, commit=True)
    assert log.offsets == {A: 1}


def test_a_later_commit_without_a_transaction_replaces_a_pending_one() -> None:
    log = Log()
    log.commit(A, 5, producer_id=7)
    log.commit(A, 2)
    log.end(7, commit=True)
    assert log.offsets == {A: 2}


def test_a_deletion_removes_pending_offsets() -> None:
    log = Log()
    log.commit(A, 5, producer_id=7)
    log.delete(A)
    log.end(7, commit=True)
    assert log.offsets == {}


def test_of_two_transactions_the_later_record_wins_whichever_commits_first() -> None:
    for first, second in ((7, 8), (8, 7)):
        log = Log()
        log.commit(A, 5, producer_id=7)
        log.commit(A, 6, producer_id=8)
        log.end(first, commit=True)
        log.end(second, commit=True)
        assert log.offsets == {A: 6}


@dataclass
class _Model:
    """Keeps every record with its position; slow and obvious."""

    position: int = 0
    committed: dict[Name, tuple[int, int]] = field(default_factory=dict)
    open: dict[int, dict[Name, tuple[int, int]]] = field(default_factory=dict)

    def commit(self, name: Name, offset: int, producer_id: int) -> None:
        self.position += 1
        if producer_id == NO_PRODUCER_ID:
            self.committed[name] = (self.position, offset)
        else:
            self.open.setdefault(producer_id, {})[name] = (self.position, offset)

    def delete(self, name: Name) -> None:
        self.committed.pop(name, None)
        for offsets in self.open.values():
            offsets.pop(name, None)

    def end(self, producer_id: int, *, commit: bool) -> None:
        for name, record in self.open.pop(producer_id, {}).items():
            if commit and record > self.committed.get(name, (0, 0)):
                self.committed[name] = record


_NAMES, _PRODUCERS = st.sampled_from([A, B]), st.sampled_from([7, 8, 9])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), _NAMES, st.one_of(st.just(NO_PRODUCER_ID), _PRODUCERS)),
        st.tuples(st.just("delete"), _NAMES, st.just(0)),
        st.tuples(st.just("end"), st.booleans(), _PRODUCERS),
        st.tuples(st.just("move"), st.none(), st.just(0)),
    ),
    max_size=40,
)


@given(_STEPS)
def test_pending_offsets_follow_the_order_of_their_records(steps: list[tuple[str, object, int]]) -> None:
    log, model = Log(), _Model()
    for number, (kind, what, producer_id) in enumerate(steps):
        if kind == "move":
            log = log.moved()
        elif kind == "end":
            log.end(producer_id, commit=what is True)
            model.end(producer_id, commit=what is True)
        else:
            assert isinstance(what, tuple)
            if kind == "delete":
                log.delete(what)
                model.delete(what)
            else:
                log.commit(what, number, producer_id)
                model.commit(what, number, producer_id)
        assert log.offsets == {name: offset for name, (_, offset) in model.committed.items()}
        undecided = {name for offsets in model.open.values() for name, record in offsets.items()}
        assert log.pending <= undecided
