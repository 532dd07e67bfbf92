"""State machine of one partition while this broker owns it in one leader epoch. Sans-IO.

::

    IDLE ──append──► OPENING ──opened──► OPEN ──bound reached──► DRAINING ──all confirmed──► OPENING or IDLE
                                           └──idle, asked to seal──► DRAINING

It gives offsets to batches, decides into which ledger they go and when the next ledger begins, and moves the high watermark
as the quorum confirms. A batch that finds no open ledger waits in a queue with its offset already given; while the partition is
held, because it is being handed over, no ledger is opened for it.

What always holds: the next ledger is opened only when every batch of the one before is confirmed, so its base offset is
true whatever happens; batches are written in offset order; the high watermark is the end of the last confirmed batch; what
waits is ``start <= high watermark <= next offset``. After a failed writer nothing is guessed: the partition is
taken over anew, and recovery decides what exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

import msgspec

from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_core.batches.batch import TRANSACTIONAL_BIT, BatchHeader
from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_core.errors import NotEnoughBookies, NotLeader, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.partition_state.producer_states import Displaced
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_core.partition_state.transactions import AbortedTransaction

LEDGER_BATCHES_MAX: Final = 100_000
"""Batches in one ledger, so that its index and the headers that a takeover reads stay bounded."""

Outcome = int | StratalogError
"""A batch's base offset, or why it was given up: ``OutcomeUnknown`` if it was sent, else an error that says it was not."""
OnDone = Callable[[Outcome], None]
"""Called once per batch, when it has what its producer asked for or is given up."""


class Acks(IntEnum):
    """What a producer waits for."""

    NONE = 0
    FIRST = 1
    ALL = -1


class State(Enum):
    IDLE = "idle"
    OPENING = "opening"
    OPEN = "open"
    DRAINING = "draining"
    RESIGNED = "resigned"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNext:
    """Open a ledger at ``base_offset``, write ``checkpoint`` first, then report ``opened``."""

    base_offset: int
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Seal the ledger, of which every batch is confirmed, at ``end_offset``; nothing waits for it."""

    ledger_id: int
    end_offset: int
    index: LedgerIndex


Instruction = OpenNext | Seal


class PendingBatch:
    """A batch that has its offset and is not confirmed yet."""

    __slots__ = (
        "acks",
        "base_offset",
        "batch",
        "displaced",
        "end_offset",
        "entry_id",
        "max_timestamp_ms",
        "on_confirmed",
        "on_done",
        "others",
        "producer_id",
    )

    def __init__(self, batch: memoryview, base_offset: int, end_offset: int, max_timestamp_ms: int, acks: int) -> None:
        self.batch = batch
        self.base_offset = base_offset
        self.end_offset = end_offset
        self.max_timestamp_ms = max_timestamp_ms
        self.acks = acks
        self.entry_id = -1
        self.on_done: OnDone | None = None
        self.on_confirmed: Callable[[], None] | None = None
        self.others: list[OnDone] | None = None
        self.producer_id = -1
        self.displaced: Displaced = None

    def settle(self, outcome: Outcome) -> None:
        """Tell all who wait for it."""
        if self.on_done is not None:
            on_done, self.on_done = self.on_done, None
            on_done(outcome)
        if self.others is not None:
            for other in self.others:
                other(outcome)
        if self.on_confirmed is not None:
            self.on_confirmed()

    def give_up(self, reason: StratalogError | None) -> None:
        """Settle it without an offset because of ``reason``; None, and all else that is no answer: the owner has changed."""
        answers = OutcomeUnknown if self.entry_id >= 0 else (NotEnoughBookies, Unavailable)
        is_answer = reason is not None and isinstance(reason, answers)
        self.settle(reason if reason is not None and is_answer else NotLeader("the partition was lost or moved"))


@dataclass(slots=True, kw_only=True)
class OpenLedger:
    """The ledger that takes appends. ``payload_bytes`` counts batches only; ``jitter`` is its share of the topic's."""

    ledger_id: int
    base_offset: int
    opened_at_ms: int
    appended_at_ms: int
    index: LedgerIndex
    jitter: float = 0.0
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RollLimits:
    """When the next ledger begins: by topic configs ``segment.*``, and by the broker's idle time."""

    segment_bytes: int
    segment_ms: int
    segment_jitter_ms: int = 0
    idle_ms: int


class PartitionCore:
    """See the module's header. Times are monotonic milliseconds."""

    def __init__(
        self,
        state: ReplayState,
        *,
        leader_epoch: int,
        log_start_offset: int,
        limits: RollLimits,
    ) -> None:
        self._replayed = state
        self.leader_epoch = leader_epoch
        self.log_start_offset = log_start_offset
        self.next_offset = self.high_watermark = state.next_offset
        self.producers = state.producers
        self.limits = limits
        self.state = State.IDLE
        self._is_awaited = False
        self.is_held = False
        """The partition is being handed over: what comes behind the open ledger waits in the queue, and no other is opened."""
        self.open: OpenLedger | None = None
        self.queue: deque[PendingBatch] = deque()
        self.queue_bytes = 0
        self.pending: deque[PendingBatch] = deque()
        self._first_copies: deque[PendingBatch] = deque()
        self._undecided: deque[tuple[PendingBatch, BatchHeader]] = deque()
        """Unconfirmed batches of transactions."""
        state.forget_below(log_start_offset)
        state.begin_epoch(leader_epoch)

    # -- appends -------------------------------------------------------------------------------------------------------

    def place(self, batch: memoryview, header: BatchHeader, base_offset: int, acks: int) -> PendingBatch:
        """Give the next offsets to a batch; then ``writable`` says whether to write it now or to ``enqueue`` it."""
        assert base_offset == self.next_offset
        end_offset = base_offset + header.last_offset_delta + 1
        self.next_offset = end_offset
        pending = PendingBatch(batch, base_offset, end_offset, header.max_timestamp_ms, acks)
        pending.displaced = self._replayed.append(header, base_offset)
        if header.producer_id >= 0:
            pending.producer_id = header.producer_id
            if header.attributes & TRANSACTIONAL_BIT:
                self._undecided.append((pending, header))
        return pending

    @property
    def writable(self) -> bool:
        """Whether the next batch may go to the open ledger at once."""
        return self.state is State.OPEN and not self.queue

    def written(self, pending: PendingBatch, entry_id: int, now_ms: int) -> None:
        """The batch became an entry of the open ledger. May begin to drain it: ask ``next_instructions``."""
        ledger = self.open
        assert ledger is not None
        size = len(pending.batch)
        pending.entry_id = entry_id
        index = ledger.index
        count = index.append(entry_id, pending.base_offset, pending.end_offset, pending.max_timestamp_ms, size)
        ledger.payload_bytes += size
        ledger.appended_at_ms = now_ms
        self.pending.append(pending)
        if pending.acks == Acks.FIRST:
            self._first_copies.append(pending)
        if ledger.payload_bytes >= self.limits.segment_bytes or count >= LEDGER_BATCHES_MAX:
            self.state = State.DRAINING

    def enqueue(self, pending: PendingBatch) -> None:
        """The batch waits for a ledger: ask ``next_instructions``."""
        self.queue.append(pending)
        self.queue_bytes += len(pending.batch)

    def next_queued(self) -> PendingBatch | None:
        """Take the next batch that waits, if the ledger is open."""
        if self.state is not State.OPEN or not self.queue:
            return None
        pending = self.queue.popleft()
        self.queue_bytes -= len(pending.batch)
        return pending

    def put_back(self, pending: PendingBatch) -> None:
        """The writer had no room for what ``next_queued`` gave."""
        self.queue.appendleft(pending)
        self.queue_bytes += len(pending.batch)

    def await_unconfirmed(self, end_offset: int, on_done: OnDone) -> bool:
        """Call ``on_done`` with the fate of the unconfirmed batch that ends there, for a retry; False if there is none."""
        pending = next((batch for batch in self._unconfirmed() if batch.end_offset == end_offset), None)
        if pending is None:
            return False
        pending.others = [*(pending.others or ()), on_done]
        return True

    def _unconfirmed(self) -> Iterator[PendingBatch]:
        yield from self.pending
        yield from self.queue

    # -- what the ledger reports ---------------------------------------------------------------------------------------

    def first_copy(self, entry_id: int) -> list[PendingBatch]:
        """One bookie has every entry up to ``entry_id``: the batches with acks=1 that this answers."""
        answered = []
        while self._first_copies and self._first_copies[0].entry_id <= entry_id:
            answered.append(self._first_copies.popleft())
        return answered

    def confirmed(self, entry_id: int) -> list[PendingBatch]:
        """The quorum has every entry up to ``entry_id``: moves the high watermark and returns the batches, in order."""
        pending = self.pending
        done = []
        while pending and pending[0].entry_id <= entry_id:
            done.append(pending.popleft())
        if done:
            assert done[0].base_offset == self.high_watermark, "batches are confirmed in offset order"
            self.high_watermark = done[-1].end_offset
        while self._first_copies and self._first_copies[0].entry_id <= entry_id:
            self._first_copies.popleft()
        if self._undecided:
            self._decide()
        return done

    def _decide(self) -> None:
        """Enter the confirmed batches of transactions."""
        while self._undecided and self._undecided[0][0].end_offset <= self.high_watermark:
            pending, header = self._undecided.popleft()
            self._replayed.transactions.replay(header, pending.base_offset, pending.batch)

    def opened(self, ledger_id: int, base_offset: int, now_ms: int, jitter: float = 0.0) -> None:
        """The next ledger takes appends. ``jitter``: from 0 to 1, how much of ``segment.jitter.ms`` it is sealed earlier."""
        assert self.state is State.OPENING
        assert base_offset == self.high_watermark
        index = LedgerIndex(base_offset)
        self.open = OpenLedger(
            ledger_id=ledger_id, base_offset=base_offset, opened_at_ms=now_ms, appended_at_ms=now_ms, index=index,
            jitter=jitter,
        )  # fmt: skip
        self.state = State.OPEN

    def move_start(self, log_start_offset: int) -> None:
        """Retention or DeleteRecords moved the first readable offset; it never goes back, nor beyond what is confirmed."""
        self.log_start_offset = max(self.log_start_offset, min(log_start_offset, self.high_watermark))

    # -- decisions -----------------------------------------------------------------------------------------------------

    def seal_now(self) -> None:
        """Somebody wants everything sealed: drain the open ledger, if there is one."""
        if self.state is State.OPEN:
            self.state = State.DRAINING

    @property
    def roll_due_ms(self) -> int | None:
        """When the open ledger will be too old or idle, if nothing is appended; None while none takes appends."""
        ledger = self.open
        if self.state is not State.OPEN or ledger is None:
            return None
        limits = self.limits
        idle_at_ms = ledger.appended_at_ms + limits.idle_ms
        earlier_ms = int(ledger.jitter * min(limits.segment_jitter_ms, limits.segment_ms))
        return min(idle_at_ms, ledger.opened_at_ms + limits.segment_ms - earlier_ms) if len(ledger.index) else idle_at_ms

    def tick(self, now_ms: int) -> None:
        """Drain a ledger that is too old or idle."""
        due_ms = self.roll_due_ms
        if due_ms is not None and now_ms >= due_ms:
            self.state = State.DRAINING

    def next_instructions(self, application_state: Callable[[], bytes | None]) -> list[Instruction]:
        """What to do now; to be asked after every event. ``application_state`` is called only for a checkpoint."""
        instructions: list[Instruction] = []
        if self.state is State.DRAINING and not self.pending:
            assert self.open is not None
            instructions.append(Seal(ledger_id=self.open.ledger_id, end_offset=self.high_watermark, index=self.open.index))
            self.open = None
            self.state = State.IDLE
        if self.state is State.IDLE and (self.queue or self._is_awaited) and not self.is_held:
            self.state, self._is_awaited = State.OPENING, False
            assert not self.queue or self.queue[0].base_offset == self.high_watermark, "all before the queue is confirmed"
            checkpoint = self.checkpoint(application_state())
            instructions.append(OpenNext(base_offset=checkpoint.offset, checkpoint=checkpoint))
        return instructions

    def open_ahead(self) -> None:
        """The next batch is expected soon: its ledger is opened before it comes. Ask ``next_instructions``."""
        self._is_awaited = self.state in (State.IDLE, State.DRAINING)

    def checkpoint(self, application_state: bytes | None) -> Checkpoint:
        """What the next owner must know if the log ends with what is confirmed."""
        unconfirmed = reversed(list(self._unconfirmed()))
        displaced = ((batch.producer_id, batch.displaced) for batch in unconfirmed if batch.producer_id >= 0)
        checkpoint = self._replayed.checkpoint(self.high_watermark, displaced)
        return msgspec.structs.replace(checkpoint, application_state=application_state)

    def resign(self) -> list[PendingBatch]:
        """Stop for ever; returns the batches whose fate this broker no longer knows or that were never written."""
        self.state = State.RESIGNED
        abandoned = list(self._unconfirmed())
        self.pending.clear()
        self.queue.clear()
        self._first_copies.clear()
        self._undecided.clear()
        self.queue_bytes = 0
        return abandoned

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def last_stable_offset(self) -> int:
        """First offset of the oldest open transaction; the high watermark if none is open."""
        return self._replayed.transactions.last_stable_offset(self.high_watermark)

    def aborted_between(self, start_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """Aborted transactions that overlap the offsets from ``start_offset`` to below ``end_offset``."""
        return self._replayed.transactions.aborted_between(start_offset, end_offset)

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """``(greatest epoch <= epoch, its end offset)`` (KIP-320), or ``(-1, -1)`` if nothing is known of it."""
        if epoch >= self.leader_epoch:
            return (self.leader_epoch, self.next_offset) if epoch == self.leader_epoch else (-1, -1)
        found = -1
        for start in self._replayed.leader_epochs:
            if start.epoch > epoch:
                return (found, start.start_offset) if found >= 0 else (epoch, start.start_offset)
            found = start.epoch
        raise AssertionError("the current epoch is the last one")

    def epoch_at(self, offset: int) -> int:
        """Leader epoch that wrote ``offset``; -1 if unknown."""
        epoch = -1
        for start in self._replayed.leader_epochs:
            if start.start_offset > offset:
                break
            epoch = start.epoch
        return epoch

    def validate_state(self) -> None:
        """Assert what always holds."""
        assert self.log_start_offset <= self.high_watermark <= self.next_offset == self._replayed.next_offset
        assert self.last_stable_offset <= self.high_watermark
        batches = list(self._unconfirmed())
        expected = self.high_watermark
        for batch in batches:
            assert batch.base_offset == expected, "unconfirmed batches are contiguous from the high watermark on"
            expected = batch.end_offset
        assert self.state is State.RESIGNED or expected == self.next_offset
        assert self.queue_bytes == sum(len(batch.batch) for batch in self.queue)
        assert (self.open is not None) == (self.state in (State.OPEN, State.DRAINING)) or self.state is State.RESIGNED
        assert not (self.pending and self.state in (State.IDLE, State.OPENING)), "an unconfirmed batch has an open ledger"
        self._replayed.validate_state()
