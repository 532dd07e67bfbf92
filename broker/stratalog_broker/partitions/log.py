"""One owned partition: the shell that connects the partition core to a ledger writer, the tail cache and its watchers.

An append sets offsets in place and adds the batch as an entry of the open ledger (or queues it for the next one). The writer
reports the first copy and the quorum; then the core moves the high watermark, producers are answered and fetches woken. All of
this happens in callbacks of one event loop; tasks exist only while a ledger is opened or sealed.

A writer failure, a command with unknown outcome or the end of the session resigns this object permanently. A takeover, here or
on another broker, creates a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from stratalog_bookies.client import LedgerClient, LedgerWriter
from stratalog_broker.cluster.replicas import newest_ledger
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.partitions.core import PartitionCore, State
from stratalog_broker.partitions.index_cache import IndexCache
from stratalog_broker.partitions.instructions import NOTHING, Instruction, Seal, Write
from stratalog_broker.partitions.internal_topics import InternalTopicApplication
from stratalog_broker.partitions.late_beginnings import LateBeginnings
from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_broker.partitions.ledger_opening import LedgerOpening
from stratalog_broker.partitions.ledger_quorums import is_roll_due
from stratalog_broker.partitions.ledger_sealing import LedgerSealing
from stratalog_broker.partitions.ledger_trimming import LedgerTrimming
from stratalog_broker.partitions.pending_batch import ACKS_FIRST, ACKS_NONE, OnDone, PendingBatch
from stratalog_broker.partitions.quorum_admission import QuorumAdmission
from stratalog_broker.partitions.release import Release
from stratalog_broker.partitions.roll_schedule import RollSchedule
from stratalog_broker.partitions.tail_cache import PartitionTail, TailCache
from stratalog_broker.partitions.writer_reports import WriterReports
from stratalog_core.batches.batch import BatchHeader, assign_offset
from stratalog_core.batches.checkpoint import Checkpoint, encode_checkpoint
from stratalog_core.errors import Corrupt, Fenced, NotLeader, Overloaded, StratalogError, Unavailable
from stratalog_core.ports import Clock, Random
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Ledger, Topic, TopicPartition, partition_key
from stratalog_metadata.state.commands import EpochIs
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs

_log = logging.getLogger(__name__)
_ROOM_RETRY_S: Final = 0.02
_BUSY_MS: Final = 1000


class Watcher(Protocol):
    """Waits for partitions."""

    def moved(self, log: PartitionLog) -> None:
        """Note that the high watermark has moved or the partition was resigned; must not act on the partition in this call."""
        ...


class PartitionLog:
    """Serves the partition from construction until ``resign``."""

    def __init__(
        self,
        *,
        settings: BrokerSettings,
        metadata: MetadataClient,
        ledgers: LedgerClient,
        clock: Clock,
        random: Random,
        topic: Topic,
        topic_partition: TopicPartition,
        core: PartitionCore,
        tails: TailCache,
        indexes: IndexCache,
        application: InternalTopicApplication | None,
        on_lost: Callable[[PartitionLog, Exception], None],
        rolls: RollSchedule,
    ) -> None:
        self.topic_partition = topic_partition
        self.core = core
        self.tail = PartitionTail(tails, core.next_offset)
        self.application = application
        self.admission, self.late_beginnings = QuorumAdmission(ledgers, clock), LateBeginnings()
        self.watchers: dict[Watcher, None] = {}
        """Notified, in the order of registration, after the high watermark has moved and when the partition is resigned."""
        self.is_serving = True
        self.is_leaving = False
        """A handover is in progress or queued."""
        self.is_releasing = False
        """The next owner may have begun to acknowledge records: readers wait, because the high watermark might be old."""
        self.bytes_in, self.bytes_out = 0, 0
        self.bytes_in_reported = 0
        """Value last reported to the controller by the load meter; starts at zero with each owner, like the counters."""
        self.bytes_out_reported = 0
        self._settings, self._view, self._ledgers = settings, metadata.view, ledgers
        self._clock, self._random, self._on_lost, self._rolls = clock, random, on_lost, rolls
        self._ledger_opening = LedgerOpening(self._view, ledgers, topic_partition, self.requirement)
        trimming = LedgerTrimming(metadata, ledgers, topic_partition, self.requirement)
        self._trimming = trimming if application is not None else None
        self._writer: LedgerWriter | None = None
        self._opening: asyncio.Task[None] | None = None
        self.sealing = LedgerSealing(indexes, self._released, self._lose)
        self._release: Callable[[], Release | None] | None = None
        self._held_busy = self._first_copies_wanted = False
        self._retry: asyncio.TimerHandle | None = None
        self.update_topic(topic)

    def update_topic(self, topic: Topic) -> None:
        """Apply the configs in force: the topic or the cluster-wide defaults have changed, or a ledger was opened."""
        self.topic = topic
        self.configs = TopicConfigs.in_force(topic, self._view)
        limits = self.configs.roll_limits(self._settings.ledger_idle_ms)
        self.core.set_limits(limits if self._trimming is None else self._trimming.limit(limits))
        self._watch_age()
        self._follow_quorums()

    def _follow_quorums(self) -> None:
        """Roll the open ledger if the topic's quorums have changed; for an internal topic, open the next ledger at once."""
        opened = self._writer.ledger if self._writer is not None else None
        if opened is None and self.application is not None and self.core.state is State.IDLE:
            opened = newest_ledger(self._view, self.topic_partition.topic_id, self.topic_partition.partition)
        if opened is not None and is_roll_due(self._ledgers, opened, self.topic, self.configs):
            self._handle(self.core.seal_now)
            if self.application is not None:
                self._handle(self.core.open_ahead)

    @property
    def requirement(self) -> EpochIs:
        """The requirement on every command of this owner."""
        key = partition_key(self.topic_partition.topic_id, self.topic_partition.partition)
        return EpochIs(key=key, owner=self._settings.broker_id, leader_epoch=self.core.leader_epoch)

    @property
    def lacks_quorum(self) -> bool:
        """Whether too few bookies answer for the open ledger, or exist for the next one if none is open."""
        if self._writer is not None:
            return self._writer.lacks_quorum
        return not self.admission.can_open(self.topic.replication_factor, self.configs)

    @property
    def is_unsealed(self) -> bool:
        """Whether a ledger is open, being opened or being sealed."""
        return self.core.state is not State.IDLE or self.sealing.has_unsealed

    @property
    def is_busy(self) -> bool:
        """Whether a batch was appended within the last second or is queued."""
        ledger = self.core.open
        return bool(self.core.queue) or (ledger is not None and ledger.appended_at_ms + _BUSY_MS > self._now_ms())

    def unsealed(self, ledger_id: int) -> tuple[Ledger, LedgerIndex] | None:
        """Return the record and index of a ledger that is open or being sealed; None for any other."""
        if self._writer is not None and self.core.open is not None and self.core.open.ledger_id == ledger_id:
            return self._writer.ledger, self.core.open.index
        return self.sealing.unsealed(ledger_id)

    # -- appends -------------------------------------------------------------------------------------------------------

    def append(
        self,
        batch: memoryview,
        header: BatchHeader,
        acks: int,
        on_done: OnDone | None,
        on_confirmed: Callable[[], None] | None = None,
    ) -> int:
        """Append one validated batch, whose bytes this log owns from now on; return its base offset.

        ``on_done`` is called when the batch has the copies that ``acks`` asks for or is given up, ``on_confirmed`` when its
        bytes are no longer held for the write. Raises ``NotLeader``, ``Overloaded``, ``NotEnoughBookies`` or what the writer
        raises; nothing has changed then, unless a broken invariant resigned the partition: the batch may be stored.
        """
        core = self.core
        base_offset, is_open = core.reserve(acks)
        writer = self._writer
        if acks != ACKS_NONE and (writer is None or writer.lacks_quorum or not self.configs.takes_acks_all):
            self.admission.check(writer, core.is_held, self.topic.replication_factor, self.configs, acks)
        assign_offset(batch, base_offset, core.leader_epoch)
        if acks == ACKS_FIRST and not self._first_copies_wanted:
            self._want_first_copies()
        entry_id = self._write(batch) if is_open else None
        now_ms = int(self._clock.monotonic() * 1000)
        try:
            instructions = core.commit(batch, header, base_offset, acks, entry_id, now_ms, on_done, on_confirmed)
        except AssertionError as broken:
            is_added = base_offset in [pending.base_offset for pending in core.unconfirmed()]
            self._lose_inconsistent(broken)
            if not is_added:  # then the loss has not answered it
                raise NotLeader(f"{self.topic_partition} was lost before it took the batch") from broken
            return base_offset
        self.tail.append(base_offset, core.next_offset, batch)
        self.bytes_in += len(batch)
        if instructions:
            self._act(instructions)
        return base_offset

    def _want_first_copies(self) -> None:
        """Make the writers report first copies from now on, for acks=1. Most partitions never need these reports."""
        self._first_copies_wanted = True
        if self._writer is not None:
            self._writer.tell_first_copies(True)

    def _write(self, batch: memoryview) -> int | None:
        """Return the batch's entry id; None if the writer is full, after scheduling a retry."""
        assert self._writer is not None
        try:
            return self._writer.append(batch)
        except Overloaded:
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(_ROOM_RETRY_S, self._room_retry)
            return None

    def _room_retry(self) -> None:
        self._retry = None
        self._handle(self.core.room)
        self._watch_age()

    # -- reports of the ledger writer (LedgerListener, through WriterReports) -------------------------------------------

    def first_copy(self, entry_id: int) -> None:
        for pending in self.core.first_copy(entry_id):
            if pending.on_done is not None:
                on_done, pending.on_done = pending.on_done, None
                on_done(pending.base_offset)

    def confirmed(self, lac: int) -> None:
        if self._trimming is not None:
            self._trimming.confirmed(lac)
        try:
            done, instructions = self.core.confirmed(lac)
        except AssertionError as broken:
            self._lose_inconsistent(broken)
            return
        if self.application is not None:
            self._apply(self.application, done)
        if instructions and self.is_serving:
            self._act(instructions)
        for pending in done:
            pending.settle(pending.base_offset)
        if done and self.watchers:
            self.notify()

    def _apply(self, application: InternalTopicApplication, confirmed: Sequence[PendingBatch]) -> None:
        try:
            for pending in confirmed:
                application.apply(pending.batch)
        except AssertionError as broken:
            self._lose_inconsistent(broken)

    def writer_failed(self, writer_ledger_id: int, error: StratalogError) -> None:
        if self.core.open is not None and self.core.open.ledger_id == writer_ledger_id:
            self._lose(error)

    def notify(self) -> None:
        """Notify all watchers."""
        for watcher in list(self.watchers):
            watcher.moved(self)

    # -- ledgers -------------------------------------------------------------------------------------------------------

    def tick(self) -> int | None:
        """Roll the open ledger if it is too old or idle; return when to check again (``roll_schedule.py``)."""
        self._handle(self.core.tick, self._now_ms())
        return self.core.roll_due_ms

    def _watch_age(self) -> None:
        if (due_ms := self.core.roll_due_ms) is not None:
            self._rolls.look_at(self, due_ms)

    def _handle(self, event: Callable[..., Sequence[Instruction]], *details: int | float) -> None:
        """Report an event to the core and carry out its instructions. A broken invariant resigns the partition."""
        try:
            instructions = event(*details)
        except AssertionError as broken:
            self._lose_inconsistent(broken)
        else:
            self._act(instructions)

    def _act(self, instructions: Sequence[Instruction]) -> None:
        """Carry out the core's instructions, and those that result from them, before any other event."""
        todo = deque(instructions)
        try:
            while todo:
                instruction = todo.popleft()
                if isinstance(instruction, Write):
                    todo.extend(self._write_queued(instruction))
                elif isinstance(instruction, Seal):
                    writer, self._writer = self._writer, None
                    assert writer is not None
                    self.sealing.begin(writer, instruction)
                else:
                    opening = self._open(self.completed(instruction.checkpoint))
                    self._opening = asyncio.get_running_loop().create_task(opening)
        except AssertionError as broken:
            self._lose_inconsistent(broken)

    def completed(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the core's checkpoint with the application's state added; both are the state after the same batches."""
        if self.application is None:
            return checkpoint
        return msgspec.structs.replace(checkpoint, application_state=self.application.snapshot())

    def _write_queued(self, instruction: Write) -> Sequence[Instruction]:
        try:
            entry_id = self._write(instruction.batch)
        except StratalogError as failure:
            self._lose(failure)
            return NOTHING
        return NOTHING if entry_id is None else self.core.written(entry_id, self._now_ms())

    async def _open(self, checkpoint: Checkpoint) -> None:
        reports = WriterReports(self)
        parts = encode_checkpoint(checkpoint, self._settings.checkpoint_part_bytes)
        try:
            async with asyncio.timeout(self._settings.append_timeout_ms / 1000):
                if self.sealing.last is not None:
                    await asyncio.shield(self.sealing.last)
                writer = await self._ledger_opening.open(self.topic, checkpoint.offset, reports, parts)
        except Exception as failure:
            self._lose(Unavailable("the next ledger did not open in time") if isinstance(failure, TimeoutError) else failure)
            return
        if self.core.state is not State.OPENING:
            writer.abandon()
            return
        reports.ledger_id = writer.ledger.ledger_id
        writer.tell_first_copies(self._first_copies_wanted)
        self._writer = writer
        if self._trimming is not None:
            self._trimming.opened(writer, parts)
        self._handle(self.core.opened, writer.ledger.ledger_id, self._now_ms(), self.configs.jitter(self._random))
        self.update_topic(self.topic)

    def _released(self) -> Release | None:
        """Return what the seal that begins now releases the partition with, if it is being handed over."""
        release = self._release() if self._release is not None and self.is_serving else None
        self.is_releasing |= release is not None
        return release

    def roll(self) -> None:
        """Seal the open ledger; the next append opens another one."""
        self._handle(self.core.seal_now)

    def handover_checkpoint(self) -> bytes:
        """Return the state at the high watermark, for the next owner; empty if it is larger than one entry."""
        checkpoint = msgspec.structs.replace(self.completed(self.core.checkpoint()), more_is_coming=self._held_busy)
        parts = encode_checkpoint(checkpoint, self._settings.checkpoint_part_bytes)
        return parts[0] if len(parts) == 1 else b""

    async def seal_all(self) -> int:
        """Seal the open ledger and return the offset below which everything is sealed. Raises ``NotLeader``."""
        if self.core.state is State.OPENING and self._opening is not None:
            await asyncio.shield(self._opening)
        self.roll()
        if not self.is_serving:
            raise NotLeader(f"{self.topic_partition} was lost before its ledger was sealed")
        if self.core.state is not State.DRAINING and not self.sealing.is_sealing:
            return self.core.high_watermark
        return await self.sealing.next_end()

    def open_ahead(self) -> None:
        """Open the next ledger now, because a batch is expected soon."""
        self._handle(self.core.open_ahead)

    def hold(self, release: Callable[[], Release | None]) -> None:
        """Queue new batches from now on; seal the last ledger together with the release that ``release`` then returns."""
        self._release, self._held_busy = release, self.is_busy
        self.core.hold()

    def go_on(self) -> None:
        """End the hold: write the queued batches here, if the partition is still served."""
        self._release = None
        self._handle(self.core.go_on)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _lose(self, error: Exception) -> None:
        if self.is_serving:
            if not isinstance(error, Fenced):
                _log.warning("lost %s: %s", self.topic_partition, error, exc_info=not isinstance(error, StratalogError))
            self.resign(error)
            self._on_lost(self, error)

    def _lose_inconsistent(self, broken: AssertionError) -> None:
        """Resign because of a defect: a takeover reads the durable state."""
        _log.exception("the state of %s is inconsistent", self.topic_partition)
        self._lose(Corrupt(f"the state of {self.topic_partition} is inconsistent: {broken}"))

    def resign(self, reason: Exception | None = None) -> None:
        """Stop serving, permanently. No batch is acknowledged any more; waiters get ``reason`` or ``NotLeader``."""
        if not self.is_serving:
            return
        self.is_serving = False
        self._rolls.forget(self)
        self._ledger_opening.stop()
        if self._writer is not None:
            self._writer.abandon()
        if self._retry is not None:
            self._retry.cancel()
        if self._trimming is not None:
            self._trimming.stop()
        for pending in self.core.resign():
            pending.give_up(reason)
        self.sealing.fail_waiters(NotLeader(f"{self.topic_partition} was lost before its ledger was sealed"))
        self.tail.clear()
        if self.application is not None:
            self.application.resigned()
        self.notify()

    async def close(self) -> None:
        """Cancel the tasks that open and seal ledgers and wait for them; call after ``resign``."""
        tasks = [task for task in (self._opening, self.sealing.last) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)
