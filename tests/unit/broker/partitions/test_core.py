"""The partition core under random sequences of everything that can happen to it, and the decisions it must take."""

from __future__ import annotations

import struct
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.partitions.core import Acks, OpenNext, PartitionCore, PendingBatch, RollLimits, Seal, State
from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader, read_header
from stratalog_core.batches.checkpoint import Checkpoint, EpochStart, OngoingTransaction
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_core.partition_state.transactions import COMMIT

LIMITS = RollLimits(segment_bytes=1000, segment_ms=10_000, idle_ms=5_000)
CHECKPOINT_ENTRIES = 1


def core(next_offset: int = 100, epochs: tuple[EpochStart, ...] = (EpochStart(1, 0),)) -> PartitionCore:
    state = ReplayState()
    state.load(Checkpoint(offset=next_offset, leader_epochs=epochs))
    return PartitionCore(state, leader_epoch=3, log_start_offset=0, limits=LIMITS)


def header(records: int, producer_id: int = -1, sequence: int = -1) -> BatchHeader:
    return BatchHeader(0, 49, 0, 2, 0, 0, records - 1, 0, 0, producer_id, 0, sequence, records)


class Ledgers:
    """Plays the shell and the bookies: carries instructions out, confirms in order, checks what is asked of it."""

    def __init__(self, partition: PartitionCore) -> None:
        self.core = partition
        self.opening: OpenNext | None = None
        self.next_entry = 0
        self.unconfirmed: deque[int] = deque()
        self.sealed: list[Seal] = []
        self.opened_at: list[int] = []
        self.checkpoints: list[Checkpoint] = []
        self.log: list[PendingBatch] = []
        self.now_ms = 0
        self.sequence = 0

    def carry_out(self) -> None:
        for instruction in self.core.next_instructions(lambda: None):
            if isinstance(instruction, Seal):
                assert not self.unconfirmed, "a ledger is sealed when all of it is confirmed"
                self.sealed.append(instruction)
            else:
                assert self.opening is None
                assert not self.core.is_held, "no ledger is opened behind a partition that is being handed over"
                assert not self.unconfirmed, "the next ledger begins when the last is confirmed"
                self.opening = instruction
                self.checkpoints.append(instruction.checkpoint)

    def write(self, pending: PendingBatch) -> None:
        self.core.written(pending, self.next_entry, self.now_ms)
        self.unconfirmed.append(self.next_entry)
        self.next_entry += 1
        self.log.append(pending)

    def append(self, records: int, size: int) -> None:
        partition = self.core
        base_offset = partition.next_offset
        made = header(records, producer_id=1, sequence=self.sequence)
        self.sequence += records
        writable = partition.writable
        pending = partition.place(memoryview(bytes(size)), made, base_offset, Acks.ALL)
        if writable:
            self.write(pending)
        else:
            partition.enqueue(pending)
        self.carry_out()

    def finish_opening(self) -> None:
        if self.opening is None:
            return
        base_offset, self.opening = self.opening.base_offset, None
        self.opened_at.append(base_offset)
        self.next_entry = CHECKPOINT_ENTRIES
        self.core.opened(len(self.opened_at), base_offset, self.now_ms)
        self.write_queued()

    def write_queued(self) -> None:
        while (pending := self.core.next_queued()) is not None:
            self.write(pending)
        self.carry_out()

    def confirm(self, count: int) -> None:
        for _ in range(min(count, len(self.unconfirmed))):
            last = self.unconfirmed.popleft()
            self.core.confirmed(last)
        self.write_queued()


events = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 5), st.integers(1, 600)),
    st.tuples(st.just("open"), st.just(0), st.just(0)),
    st.tuples(st.just("confirm"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("tick"), st.integers(1, 6_000), st.just(0)),
    st.tuples(st.just("seal"), st.just(0), st.just(0)),
    st.tuples(st.just("open ahead"), st.just(0), st.just(0)),
    st.tuples(st.just("hold"), st.just(0), st.just(0)),
    st.tuples(st.just("go on"), st.just(0), st.just(0)),
)


@given(st.lists(events, max_size=60))
def test_offsets_stay_contiguous_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    partition = core()
    ledgers = Ledgers(partition)
    for step, first, second in steps:
        if step == "append":
            ledgers.append(first, second)
        elif step == "open":
            ledgers.finish_opening()
        elif step == "confirm":
            ledgers.confirm(first)
        elif step == "open ahead":
            partition.open_ahead()
            ledgers.carry_out()
        elif step in ("hold", "go on"):
            partition.is_held = step == "hold"
            ledgers.carry_out()
        elif step == "tick":
            ledgers.now_ms += first
            partition.tick(ledgers.now_ms)
            ledgers.carry_out()
        else:
            partition.seal_now()
            ledgers.carry_out()
        partition.validate_state()
    partition.is_held = False
    ledgers.carry_out()
    for _ in range(200):
        ledgers.finish_opening()
        ledgers.confirm(100)
    partition.validate_state()
    assert partition.high_watermark == partition.next_offset, "everything is confirmed in the end"
    offsets = [(batch.base_offset, batch.end_offset) for batch in ledgers.log]
    assert [start for start, _ in offsets] == [100, *(end for _, end in offsets[:-1])][: len(offsets)]
    assert ledgers.opened_at == sorted(ledgers.opened_at)
    for checkpoint in ledgers.checkpoints:
        assert all(batch.last_offset < checkpoint.offset for entry in checkpoint.producers for batch in entry.batches), (
            "a checkpoint knows nothing of what comes after it"
        )
        known = [entry.batches[-1].last_offset + 1 for entry in checkpoint.producers]
        assert known == ([checkpoint.offset] if checkpoint.offset > 100 else []), "it knows the last batch before it"


def test_a_full_ledger_is_drained_sealed_and_followed_by_the_next() -> None:
    partition = core()
    ledgers = Ledgers(partition)
    ledgers.append(1, 600)
    ledgers.finish_opening()
    ledgers.append(1, 600)
    assert partition.state is State.DRAINING
    ledgers.append(1, 10)
    assert ledgers.sealed == []
    ledgers.confirm(2)
    assert [seal.end_offset for seal in ledgers.sealed] == [102]
    assert partition.state.value == "opening"
    ledgers.finish_opening()
    ledgers.confirm(1)
    assert partition.high_watermark == 103


def test_an_idle_partition_holds_no_ledger_open() -> None:
    partition = core()
    ledgers = Ledgers(partition)
    ledgers.append(2, 10)
    ledgers.finish_opening()
    ledgers.confirm(1)
    partition.tick(LIMITS.idle_ms)
    ledgers.carry_out()
    assert partition.state is State.IDLE
    assert [seal.end_offset for seal in ledgers.sealed] == [102]


def open_with_one_batch(limits: RollLimits, jitter: float) -> PartitionCore:
    partition = core()
    partition.limits = limits
    ledgers = Ledgers(partition)
    ledgers.append(1, 10)
    partition.opened(1, partition.high_watermark, 0, jitter)
    ledgers.write_queued()
    return partition


@given(st.integers(100, 5000), st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_jitter_seals_a_ledger_earlier_by_at_most_itself(segment_ms: int, jitter_ms: int, jitter: float) -> None:
    limits = RollLimits(segment_bytes=1000, segment_ms=segment_ms, segment_jitter_ms=jitter_ms, idle_ms=100_000)
    due_ms = open_with_one_batch(limits, jitter).roll_due_ms
    assert due_ms is not None
    assert max(0, segment_ms - jitter_ms) <= due_ms <= segment_ms
    assert due_ms == segment_ms - int(jitter * min(jitter_ms, segment_ms))


def test_first_copies_answer_only_those_who_asked() -> None:
    partition = core()
    ledgers = Ledgers(partition)
    ledgers.append(1, 10)
    ledgers.finish_opening()
    pending = partition.place(memoryview(bytes(10)), header(1), partition.next_offset, Acks.FIRST)
    ledgers.write(pending)
    assert partition.first_copy(1) == []
    assert partition.first_copy(2) == [pending]
    assert partition.high_watermark == 100, "readers see what the quorum has"


def test_resigning_gives_back_all_that_is_unconfirmed() -> None:
    partition = core()
    ledgers = Ledgers(partition)
    ledgers.append(1, 10)
    ledgers.finish_opening()
    ledgers.append(1, 2000)
    ledgers.append(1, 10)
    assert [batch.base_offset for batch in partition.resign()] == [100, 101, 102]
    assert partition.next_instructions(lambda: None) == []
    partition.validate_state()


def test_ends_of_epochs_are_kafkas() -> None:
    partition = core(epochs=(EpochStart(0, 0), EpochStart(1, 50), EpochStart(2, 100)))
    assert partition.end_of_epoch(0) == (0, 50)
    assert partition.end_of_epoch(1) == (1, 100), "epoch 2 wrote nothing"
    assert partition.end_of_epoch(2) == (1, 100)
    assert partition.end_of_epoch(3) == (3, 100)
    assert partition.end_of_epoch(4) == (-1, -1)
    assert partition.epoch_at(49) == 0
    assert partition.epoch_at(50) == 1
    later = core(epochs=(EpochStart(2, 20),))
    assert later.end_of_epoch(1) == (1, 20)


def test_the_last_stable_offset_waits_for_an_open_transaction() -> None:
    """Transactions are those of confirmed batches: readers see nothing else, and a checkpoint holds nothing else."""
    partition = core()
    ledgers = Ledgers(partition)
    batches = [
        build_batch([Record(offset=0, timestamp_ms=0, key=key, value=b"")], attributes=attributes, producer_id=7,
                    producer_epoch=0, base_sequence=sequence)
        for attributes, key, sequence in (
            (TRANSACTIONAL_BIT, None, 0),
            (TRANSACTIONAL_BIT | CONTROL_BIT, struct.pack(">hh", 0, COMMIT), -1),
        )
    ]  # fmt: skip
    ledgers.append(1, 10)
    ledgers.finish_opening()
    for batch in batches:
        pending = partition.place(memoryview(batch), read_header(batch), partition.next_offset, Acks.ALL)
        ledgers.write(pending)
    assert (partition.high_watermark, partition.last_stable_offset) == (100, 100)
    ledgers.confirm(2)
    assert (partition.high_watermark, partition.last_stable_offset) == (102, 101)
    assert partition.checkpoint(None).transactions == (OngoingTransaction(7, 101),)
    ledgers.confirm(1)
    assert (partition.high_watermark, partition.last_stable_offset) == (103, 103)
    assert partition.checkpoint(None).transactions == ()
    partition.validate_state()
