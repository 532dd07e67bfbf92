"""The partition core under random sequences of everything that can happen to it, and the decisions it must take."""

from __future__ import annotations

import ast
import re
import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratalog_broker
from stratalog_broker.partitions.core import PartitionCore, State
from stratalog_broker.partitions.instructions import Instruction, OpenNext, Seal, Write
from stratalog_broker.partitions.pending_batch import Acks
from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader, read_header
from stratalog_core.batches.checkpoint import Checkpoint, EpochStart, OngoingTransaction
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import NotLeader, Overloaded
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_core.partition_state.transactions import COMMIT
from stratalog_metadata.topic_rules.topic_configs import RollLimits

LIMITS = RollLimits(segment_bytes=1000, segment_ms=10_000, idle_ms=5_000)
CHECKPOINT_ENTRIES = 1
QUEUE_BYTES_MAX = 1_000_000


def core(next_offset: int = 100, epochs: tuple[EpochStart, ...] = (EpochStart(1, 0),)) -> PartitionCore:
    state = ReplayState()
    state.load(Checkpoint(offset=next_offset, leader_epochs=epochs))
    return PartitionCore(state, leader_epoch=3, log_start_offset=0, limits=LIMITS, queue_bytes_max=QUEUE_BYTES_MAX)


def header(records: int, producer_id: int = -1, sequence: int = -1) -> BatchHeader:
    return BatchHeader(0, 49, 0, 2, 0, 0, records - 1, 0, 0, producer_id, 0, sequence, records)


class Ledgers:
    """Plays the shell and the bookies: carries instructions out, confirms in order, checks what is asked of it."""

    def __init__(self, partition: PartitionCore) -> None:
        self.core = partition
        self.opening: OpenNext | None = None
        self.next_entry = 0
        self.room = 1_000_000
        """Entries that the writer takes before it has no room."""
        self.unconfirmed: deque[int] = deque()
        self.sealed: list[Seal] = []
        self.opened_at: list[int] = []
        self.checkpoints: list[Checkpoint] = []
        self.log: list[tuple[int, int]] = []
        """Base offset and end offset of each batch, in the order of the appends."""
        self.written: list[memoryview] = []
        self.now_ms = 0
        self.sequence = 0

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        todo = deque(instructions)
        while todo:
            instruction = todo.popleft()
            if isinstance(instruction, Write):
                entry_id = self.write(instruction.batch)
                if entry_id is not None:
                    todo.extend(self.core.written(entry_id, self.now_ms))
            elif isinstance(instruction, Seal):
                assert not self.unconfirmed, "a ledger is sealed when all of it is confirmed"
                self.sealed.append(instruction)
            else:
                assert self.opening is None
                assert not self.core.is_held, "no ledger is opened behind a partition that is being handed over"
                assert not self.unconfirmed, "the next ledger begins when the last is confirmed"
                self.opening = instruction
                self.checkpoints.append(instruction.checkpoint)

    def write(self, batch: memoryview) -> int | None:
        """The entry id, or None without room."""
        if not self.room:
            return None
        self.room -= 1
        self.written.append(batch)
        self.unconfirmed.append(self.next_entry)
        self.next_entry += 1
        return self.unconfirmed[-1]

    def append(self, records: int, size: int, acks: int = Acks.ALL) -> None:
        made = header(records, producer_id=1, sequence=self.sequence)
        self.sequence += records
        self.append_batch(memoryview(bytes(size)), made, acks)

    def append_batch(self, batch: memoryview, made: BatchHeader, acks: int = Acks.ALL) -> None:
        base_offset, is_open = self.core.reserve(acks)
        entry_id = self.write(batch) if is_open else None
        instructions = self.core.commit(batch, made, base_offset, acks, entry_id, self.now_ms)
        self.log.append((base_offset, self.core.next_offset))
        self.carry_out(instructions)

    def finish_opening(self) -> None:
        if self.opening is None:
            return
        base_offset, self.opening = self.opening.checkpoint.offset, None
        self.opened_at.append(base_offset)
        self.next_entry = CHECKPOINT_ENTRIES
        self.carry_out(self.core.opened(len(self.opened_at), self.now_ms))

    def make_room(self, entries: int) -> None:
        self.room = entries
        self.carry_out(self.core.room())

    def confirm(self, count: int) -> None:
        for _ in range(min(count, len(self.unconfirmed))):
            _, instructions = self.core.confirmed(self.unconfirmed.popleft())
            self.carry_out(instructions)

    def step(self, what: str, count: int, size: int) -> None:
        """One event of a random sequence."""
        partition = self.core
        if what == "tick":
            self.now_ms += count
        steps: dict[str, Callable[[], object]] = {
            "append": lambda: self.append(count, size),
            "open": self.finish_opening,
            "confirm": lambda: self.confirm(count),
            "room": lambda: self.make_room(count),
            "hold": partition.hold,
            "go on": lambda: self.carry_out(partition.go_on()),
            "open ahead": lambda: self.carry_out(partition.open_ahead()),
            "tick": lambda: self.carry_out(partition.tick(self.now_ms)),
            "seal": lambda: self.carry_out(partition.seal_now()),
        }
        steps[what]()


events = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 5), st.integers(1, 600)),
    st.tuples(st.just("open"), st.just(0), st.just(0)),
    st.tuples(st.just("confirm"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("tick"), st.integers(1, 6_000), st.just(0)),
    st.tuples(st.just("seal"), st.just(0), st.just(0)),
    st.tuples(st.just("open ahead"), st.just(0), st.just(0)),
    st.tuples(st.just("room"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("hold"), st.just(0), st.just(0)),
    st.tuples(st.just("go on"), st.just(0), st.just(0)),
)


@given(st.lists(events, max_size=60))
def test_offsets_stay_contiguous_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    partition = core()
    ledgers = Ledgers(partition)
    for step in steps:
        ledgers.step(*step)
        partition.audit_state()
    ledgers.carry_out(partition.go_on())
    ledgers.make_room(1_000_000)
    for _ in range(200):
        ledgers.finish_opening()
        ledgers.confirm(100)
    partition.audit_state()
    assert partition.high_watermark == partition.next_offset, "everything is confirmed in the end"
    assert len(ledgers.written) == len(ledgers.log), "each batch is written once"
    offsets = ledgers.log
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
    ledgers.carry_out(partition.tick(LIMITS.idle_ms))
    assert partition.state is State.IDLE
    assert [seal.end_offset for seal in ledgers.sealed] == [102]


def open_with_one_batch(limits: RollLimits, jitter: float) -> PartitionCore:
    partition = core()
    partition.set_limits(limits)
    ledgers = Ledgers(partition)
    ledgers.append(1, 10)
    ledgers.carry_out(partition.opened(1, 0, jitter))
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
    ledgers.append(1, 10, Acks.FIRST)
    assert partition.first_copy(1) == []
    assert [batch.base_offset for batch in partition.first_copy(2)] == [101]
    assert partition.high_watermark == 100, "readers see what the quorum has"


def test_resigning_gives_back_all_that_is_unconfirmed() -> None:
    partition = core()
    ledgers = Ledgers(partition)
    ledgers.append(1, 10)
    ledgers.finish_opening()
    ledgers.append(1, 2000)
    ledgers.append(1, 10)
    assert [batch.base_offset for batch in partition.resign()] == [100, 101, 102]
    for instructions in (partition.seal_now(), partition.open_ahead(), partition.go_on(), partition.room()):
        assert not instructions
    partition.audit_state()


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
        ledgers.append_batch(memoryview(batch), read_header(batch))
    assert (partition.high_watermark, partition.last_stable_offset) == (100, 100)
    ledgers.confirm(2)
    assert (partition.high_watermark, partition.last_stable_offset) == (102, 101)
    assert partition.checkpoint().transactions == (OngoingTransaction(7, 101),)
    ledgers.confirm(1)
    assert (partition.high_watermark, partition.last_stable_offset) == (103, 103)
    assert partition.checkpoint().transactions == ()
    partition.audit_state()


def test_a_full_queue_refuses_a_batch_and_nothing_has_changed() -> None:
    partition = core()
    ledgers = Ledgers(partition)
    ledgers.append(1, QUEUE_BYTES_MAX + 1)
    with pytest.raises(Overloaded, match="1000001 bytes are queued for the next ledger; maximum is 1000000"):
        ledgers.append(1, 10)
    assert partition.next_offset == 101
    partition.audit_state()


def test_a_held_partition_takes_no_batch_whose_producer_would_not_hear_of_a_refusal() -> None:
    partition = core()
    partition.hold()
    with pytest.raises(NotLeader, match="moves to another broker"):
        partition.reserve(Acks.NONE)
    assert partition.reserve(Acks.ALL) == (100, False)


@pytest.mark.parametrize("field", ["next_offset", "high_watermark", "log_start_offset", "state"])
def test_an_inconsistent_state_is_found_before_a_producer_hears_of_its_batch(field: str) -> None:
    partition = core()
    ledgers = Ledgers(partition)
    ledgers.append(1, 10)
    ledgers.finish_opening()
    setattr(partition, field, State.OPENING if field == "state" else 1000)
    with pytest.raises(AssertionError):
        ledgers.confirm(1)


def test_nobody_but_the_core_assigns_its_attributes() -> None:
    assigned = [
        f"{path.name}:{target.lineno} {ast.unparse(target)}"
        for path in Path(stratalog_broker.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for part in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(part)
        if isinstance(target, ast.Attribute) and re.search(r"\bcore\.\w+$", ast.unparse(target))
    ]
    assert assigned == []
