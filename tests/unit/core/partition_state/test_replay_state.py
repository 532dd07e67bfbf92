"""The replay of a partition's state against a naive model that keeps every batch, from any checkpoint, within its bounds."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.batch import CONTROL_BIT, HEADER_BYTES, TRANSACTIONAL_BIT, BatchHeader, read_header
from stratalog_core.batches.checkpoint import (
    Checkpoint,
    EpochStart,
    OngoingTransaction,
    ProducerEntry,
    SequencedBatch,
    decode_checkpoint,
    encode_checkpoint,
)
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt
from stratalog_core.partition_state.producer_states import BATCHES_REMEMBERED, Displaced
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_core.partition_state.transactions import ABORT, COMMIT, AbortedTransaction

LEADER_CHANGE = 2
NO_PRODUCER = -1


def data_batch(offset: int, records: int, producer_id: int, epoch: int, sequence: int, *, leader: int, in_txn: bool) -> bytes:
    values = [Record(offset=offset + number, timestamp_ms=offset, key=None, value=b"v") for number in range(records)]
    attributes = TRANSACTIONAL_BIT if in_txn else 0
    identity = {"producer_id": producer_id, "producer_epoch": epoch, "base_sequence": sequence}
    return bytes(build_batch(values, attributes=attributes, leader_epoch=leader, **identity))


def marker(offset: int, producer_id: int, epoch: int, kind: int, *, leader: int) -> bytes:
    record = Record(offset=offset, timestamp_ms=offset, key=struct.pack(">hh", 0, kind), value=struct.pack(">hi", 0, offset))
    attributes = CONTROL_BIT | TRANSACTIONAL_BIT
    return bytes(
        build_batch([record], attributes=attributes, leader_epoch=leader, producer_id=producer_id, producer_epoch=epoch)
    )


class History:
    """A log in the making: a producer is idempotent and sends in sequence; its transactions begin and end at random."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.next_offset = 0
        self.leader = 1
        self._epochs: dict[int, int] = {}
        self._sequences: dict[int, int] = {}

    def add(self, what: str, producer_id: int, records: int) -> None:
        epoch = self._epochs.get(producer_id, 0)
        if what == "leader":
            self.leader += records
            return
        if what == "new epoch":
            self._epochs[producer_id], self._sequences[producer_id] = epoch + 1, 0
            return
        if what in ("commit", "abort", "other marker"):
            kind = {"commit": COMMIT, "abort": ABORT}.get(what, LEADER_CHANGE)
            batch = marker(self.next_offset, producer_id, epoch, kind, leader=self.leader)
        elif what == "plain":
            batch = data_batch(self.next_offset, records, NO_PRODUCER, -1, -1, leader=self.leader, in_txn=False)
        else:
            sequence = self._sequences.get(producer_id, 0)
            self._sequences[producer_id] = sequence + records
            batch = data_batch(
                self.next_offset, records, producer_id, epoch, sequence, leader=self.leader, in_txn=what == "transactional"
            )
        self.batches.append(batch)
        self.next_offset = read_header(batch).next_offset


kinds = ("plain", "idempotent", "transactional", "transactional", "commit", "abort", "other marker", "new epoch", "leader")
events = st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 3), st.integers(1, 3)), max_size=50)


def history_of(steps: list[tuple[str, int, int]]) -> History:
    history = History()
    for step in steps:
        history.add(*step)
    return history


@dataclass(frozen=True)
class Model:
    """A model of a log that answers each question by looking at all batches."""

    headers: list[BatchHeader]
    markers: dict[int, int]
    """Kind of each control batch by its offset; a marker's coordinator epoch is its offset."""

    @classmethod
    def of(cls, batches: list[bytes]) -> Model:
        headers = [read_header(batch) for batch in batches]
        # The key of the only record: the two bytes of its type stand ahead of the value's length and six bytes, and no headers.
        kinds = {read_header(batch).base_offset: batch[-9] for batch in batches if read_header(batch).is_control}
        return cls(headers, kinds)

    def epochs(self) -> list[EpochStart]:
        first: dict[int, int] = {}
        for header in self.headers:
            first.setdefault(header.leader_epoch, header.base_offset)
        return [EpochStart(epoch, offset) for epoch, offset in first.items()]

    def producer(self, producer_id: int) -> ProducerEntry | None:
        own = [header for header in self.headers if header.producer_id == producer_id]
        if producer_id < 0 or not own:
            return None
        epoch = max(header.producer_epoch for header in own)
        sent = [header for header in own if header.producer_epoch == epoch and not header.is_control]
        batches = [SequencedBatch(one.base_sequence, one.last_sequence, one.last_offset, one.max_timestamp_ms) for one in sent]
        marked = [one.base_offset for one in own if self.markers.get(one.base_offset) in (ABORT, COMMIT)]
        return ProducerEntry(producer_id, epoch, tuple(batches[-BATCHES_REMEMBERED:]), max(marked, default=-1))

    def producers(self) -> dict[int, ProducerEntry]:
        found = (self.producer(producer_id) for producer_id in {header.producer_id for header in self.headers})
        return {one.producer_id: one for one in found if one is not None}

    def transactions(self) -> list[tuple[int, int, int | None, int | None]]:
        """``(producer id, first offset, offset of the marker, kind)``; None: it is open."""
        found = list[tuple[int, int, int | None, int | None]]()
        for producer_id in {header.producer_id for header in self.headers if header.is_transactional}:
            first: int | None = None
            for header in self.headers:
                if header.producer_id != producer_id or not header.is_transactional:
                    continue
                kind = self.markers.get(header.base_offset)
                if kind is None and first is None:
                    first = header.base_offset
                elif kind in (ABORT, COMMIT) and first is not None:
                    found.append((producer_id, first, header.base_offset, kind))
                    first = None
            if first is not None:
                found.append((producer_id, first, None, None))
        return found

    def open_at(self, offset: int) -> list[OngoingTransaction]:
        """Open when all batches below ``offset`` are in, oldest first."""
        begun = [one for one in self.transactions() if one[1] < offset and (one[2] is None or one[2] >= offset)]
        return [OngoingTransaction(one[0], one[1]) for one in sorted(begun, key=lambda one: one[1])]

    def aborted(self) -> list[AbortedTransaction]:
        found = []
        for producer_id, first, end, kind in self.transactions():
            if kind == ABORT and end is not None:
                still_open = self.open_at(end + 1)
                stable = still_open[0].first_offset if still_open else end + 1
                found.append(AbortedTransaction(producer_id, first, end, stable))
        return sorted(found, key=lambda one: one.last_offset)


def replayed(batches: list[bytes], state: ReplayState | None = None) -> ReplayState:
    state = state or ReplayState()
    for batch in batches:
        header = read_header(batch)
        state.replay(header, memoryview(batch)[: None if header.is_control else HEADER_BYTES])
        state.validate_state()
    return state


def snapshot(state: ReplayState) -> Checkpoint:
    return state.checkpoint(state.next_offset)


@given(events)
def test_a_replay_equals_the_naive_model(steps: list[tuple[str, int, int]]) -> None:
    history = history_of(steps)
    model, state = Model.of(history.batches), replayed(history.batches)
    assert state.next_offset == history.next_offset
    assert state.leader_epochs == model.epochs()
    assert {one.producer_id: one for one in state.producers.snapshot()} == model.producers()
    ongoing = model.open_at(history.next_offset)
    assert list(state.transactions.snapshot()) == ongoing
    stable = ongoing[0].first_offset if ongoing else history.next_offset
    assert state.transactions.last_stable_offset(state.next_offset) == stable
    assert list(state.transactions.aborted) == model.aborted()


@given(events, st.data())
def test_a_replay_from_any_checkpoint_equals_one_in_one_go(steps: list[tuple[str, int, int]], data: st.DataObject) -> None:
    history = history_of(steps)
    cut = data.draw(st.integers(0, len(history.batches)))
    stored = encode_checkpoint(snapshot(replayed(history.batches[:cut])))
    resumed = ReplayState()
    resumed.load(decode_checkpoint(stored))
    replayed(history.batches[cut:], resumed)
    whole = replayed(history.batches)
    assert snapshot(resumed) == snapshot(whole)
    begin = resumed.transactions.aborted_from
    assert list(resumed.transactions.aborted) == [one for one in whole.transactions.aborted if one.last_offset >= begin]


@given(events, st.data())
def test_aborted_transactions_are_found_by_offsets(steps: list[tuple[str, int, int]], data: st.DataObject) -> None:
    history = history_of(steps)
    cut = data.draw(st.integers(0, len(history.batches)))
    state = ReplayState()
    state.load(snapshot(replayed(history.batches[:cut])))
    replayed(history.batches[cut:], state)
    start = data.draw(st.integers(state.transactions.aborted_from, history.next_offset + 1))
    end = data.draw(st.integers(start + 1, history.next_offset + 2))
    overlapping = [one for one in Model.of(history.batches).aborted() if one.first_offset < end and one.last_offset >= start]
    assert state.transactions.aborted_between(start, end) == overlapping


@given(events, st.integers(0, 8))
def test_an_owners_checkpoint_is_what_a_replay_of_its_confirmed_batches_gives(
    steps: list[tuple[str, int, int]], in_flight: int
) -> None:
    """Batches are appended as they come and confirmed later; whatever is in flight, the checkpoint does not know it."""
    history = history_of(steps)
    owner, unconfirmed = ReplayState(), list[tuple[BatchHeader, bytes, Displaced]]()
    for number, batch in enumerate(history.batches):
        header = read_header(batch)
        owner.begin_epoch(header.leader_epoch, header.base_offset)
        displaced = owner.producers.appended(header, header.base_offset, batch) if header.producer_id >= 0 else None
        unconfirmed.append((header, batch, displaced))
        if len(unconfirmed) > in_flight:
            done, stored, _ = unconfirmed.pop(0)
            if done.is_transactional:
                owner.transactions.replay(done, done.base_offset, stored)
        confirmed = replayed(history.batches[: number + 1 - len(unconfirmed)])
        undone = [(one.producer_id, undo) for one, _, undo in reversed(unconfirmed) if one.producer_id >= 0]
        made = owner.checkpoint(confirmed.next_offset, undone)
        assert {one.producer_id: one for one in made.producers} == {
            one.producer_id: one for one in confirmed.producers.snapshot()
        }
        assert made.transactions == confirmed.transactions.snapshot()
        assert [start for start in made.leader_epochs if start.start_offset < made.offset] == confirmed.leader_epochs


@given(events)
def test_bounds_hold_and_the_newest_stays(steps: list[tuple[str, int, int]]) -> None:
    history = history_of(steps)
    state = replayed(history.batches, ReplayState(producers_max=2, epochs_max=2, aborted_max=2))
    model = Model.of(history.batches)
    assert len(state.producers) == min(2, len(model.producers()))
    assert state.leader_epochs == model.epochs()[-2:]
    aborted = model.aborted()
    assert list(state.transactions.aborted) == aborted[-2:]
    assert state.transactions.aborted_from == (aborted[-3].last_offset + 1 if len(aborted) > 2 else 0)


def test_a_producer_is_not_forgotten_within_its_transaction() -> None:
    state = ReplayState(producers_max=2)
    history = history_of([("transactional", 0, 1), ("idempotent", 1, 1), ("idempotent", 2, 1), ("idempotent", 3, 1)])
    replayed(history.batches, state)
    assert [one.producer_id for one in state.producers.snapshot()] == [0, 3]


def test_a_checkpoint_is_cut_to_the_bounds_by_its_newest() -> None:
    """The owner that wrote it may have been allowed more."""
    entries = tuple(ProducerEntry(number, 0, (SequencedBatch(0, 0, number, 0),)) for number in range(5))
    epochs = tuple(EpochStart(number, number) for number in range(5))
    state = ReplayState(producers_max=2, epochs_max=3)
    state.load(Checkpoint(offset=5, leader_epochs=epochs, producers=entries))
    state.validate_state()
    assert state.producers.snapshot() == entries[-2:]
    assert state.leader_epochs == list(epochs[-3:])


def test_an_epoch_that_wrote_nothing_is_not_of_the_history() -> None:
    state = ReplayState()
    state.load(Checkpoint(offset=5, leader_epochs=(EpochStart(1, 0), EpochStart(2, 5))))
    assert state.leader_epochs == [EpochStart(1, 0)]
    batch = data_batch(5, 1, NO_PRODUCER, -1, -1, leader=2, in_txn=False)
    state.replay(read_header(batch), batch)
    assert state.leader_epochs == [EpochStart(1, 0), EpochStart(2, 5)]


def test_epochs_of_which_retention_left_nothing_are_dropped() -> None:
    state = ReplayState()
    state.load(Checkpoint(offset=9, leader_epochs=(EpochStart(1, 0), EpochStart(2, 5), EpochStart(4, 7))))
    state.forget_below(4)
    assert [start.epoch for start in state.leader_epochs] == [1, 2, 4]
    state.forget_below(7)
    assert state.leader_epochs == [EpochStart(4, 7)]


def test_a_gap_between_batches_is_refused() -> None:
    batch = data_batch(7, 1, NO_PRODUCER, -1, -1, leader=1, in_txn=False)
    with pytest.raises(Corrupt, match="batch at offset 7 does not continue at 6"):
        ReplayState(6).replay(read_header(batch), batch)


@pytest.mark.parametrize("size", [HEADER_BYTES, HEADER_BYTES + 5])
def test_a_marker_that_is_cut_short_is_refused(size: int) -> None:
    batch = marker(0, 1, 0, ABORT, leader=1)
    with pytest.raises(Corrupt, match=f"control batch at offset 0 is cut to {size} of {len(batch)} bytes"):
        ReplayState().replay(read_header(batch), batch[:size])


def test_a_control_record_without_a_type_is_refused() -> None:
    record = Record(offset=0, timestamp_ms=0, key=b"\x00", value=b"")
    batch = bytes(build_batch([record], attributes=CONTROL_BIT | TRANSACTIONAL_BIT, producer_id=1, producer_epoch=0))
    with pytest.raises(Corrupt, match="has no control record"):
        ReplayState().replay(read_header(batch), batch)
