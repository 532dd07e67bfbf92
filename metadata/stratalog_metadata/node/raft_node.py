"""The shell of the Raft core: clock, disk and network around it, and committed entries into the replica.

Proposals, messages and timers of one turn of the event loop become one ``Ready``. One write is in progress at a time; output
that accumulates meanwhile shares the next one (group commit). Appends to followers do not wait for the local disk; messages
that promise something do.

A disk failure or an unexpected exception stops the node for good. A leader whose disk hangs steps down (``disk_stall.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Final, Protocol

from stratalog_core.errors import Invalid
from stratalog_core.metrics.groups import LATENCY_BOUNDS_S, Histogram
from stratalog_core.ports import Background, Clock
from stratalog_core.transient_errors import lacks_resources
from stratalog_metadata.node.disk_stall import DiskStall
from stratalog_metadata.raft import Entry, Message, Raft, Ready, Snapshot
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.machine import Outcome
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage.node_storage import NodeStorage

SAVE_DELAY_S: Final = 0.1
TIMER_S_MIN: Final = 0.001
MARK_DELAY_S: Final = 0.5
"""Delay after the last write before the vote file records the log's end; until then nothing proves that the write was
durable.
"""
_log = logging.getLogger(__name__)


class NodeEvents(Protocol):
    """Callbacks from the node, on the event loop."""

    def send(self, messages: Sequence[Message]) -> None: ...
    def applied(self, entry: Entry, outcome: Outcome | None) -> None: ...
    def restored(self, image: StateImage) -> None: ...
    def read_ready(self, context: int, index: int) -> None: ...
    def read_lost(self, context: int) -> None: ...
    def turned(self) -> None:
        """End of a turn in which something may have changed."""
        ...

    def failed(self, failure: BaseException) -> None:
        """The node has stopped for good."""
        ...


class RaftNode:
    """``core`` may be read and stepped from the event loop; call :meth:`wake` afterwards."""

    def __init__(
        self,
        core: Raft,
        replica: Replica,
        storage: NodeStorage,
        *,
        clock: Clock,
        background: Background,
        events: NodeEvents,
        snapshot_entries: int,
        snapshot_bytes: int,
        kept_entries: int,
    ) -> None:
        self.core = core
        self.replica = replica
        self._storage = storage
        self._clock = clock
        self._background = background
        self._events = events
        self._snapshot_entries = snapshot_entries
        self._snapshot_bytes = snapshot_bytes
        self._kept_entries = kept_entries
        self._loop = asyncio.get_running_loop()
        self._queue: list[Ready] = []
        self._queue_filled = asyncio.Event()
        self._store_free = asyncio.Lock()
        self._compact_to = 0
        self._mark_timer: asyncio.TimerHandle | None = None
        self._is_mark_due = False
        self._saved_index = replica.index
        self._pump_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._saving = False
        self._making_snapshot = False
        self._writing = False
        self._stopped = False
        self._is_broken = False
        self.disk_stall = DiskStall(core.settings.election_timeout_s, core.settings.heartbeat_s, clock.monotonic())
        self.refused_messages = 0
        self.log_write_seconds = Histogram(LATENCY_BOUNDS_S)

    def start(self) -> None:
        self._begin(self._write_forever())
        self.wake()

    def wake(self) -> None:
        """Carry out the core's output at the end of this turn."""
        if not self._pump_scheduled and not self._stopped:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def step(self, messages: Sequence[Message], identity: str) -> None:
        """Pass messages to the core. Raises ``Invalid`` if one could not come from a correct peer; the others are
        processed.
        """
        self.core.tick(self._clock.monotonic())
        refused = None
        for message in messages:
            try:
                self.core.step(message, identity)
            except Invalid as wrong:
                refused = wrong
                self._count_refused(wrong)
        self.wake()
        if refused is not None:
            raise refused

    def _count_refused(self, wrong: Invalid) -> None:
        self.refused_messages += 1
        if self.refused_messages.bit_count() == 1:
            # Log the first, second, fourth … so that a faulty peer does not fill the log.
            _log.error("raft message refused (%d so far): %s", self.refused_messages, wrong.message)

    async def close(self, *, save: bool) -> None:
        """Stop. With ``save`` the store is brought up to date, so that the next start is quick."""
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if save and not self._is_broken:
            await self._save_unsaved()
            # Lets a restart detect an older copy of the log.
            await self._background.run(self._storage.log.mark)
        await self._background.run(self._storage.close)

    def stop(self) -> None:
        """Carry out nothing more. A write in progress ends; ``close`` waits for it."""
        # Do not cancel: a write in a thread would outlive its task.
        self._stopped = True
        self._queue_filled.set()
        for timer in (self._timer, self._mark_timer):
            if timer is not None:
                timer.cancel()

    # --- one turn ----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._stopped:
            return
        try:
            now = self._clock.monotonic()
            self.core.tick(now)
            self._watch_disk(now)
            ready = self.core.ready()
            if ready is not None:
                self._carry_out(ready)
                if ready.committed:
                    # More entries may be committed than fit into one Ready, and applying may cause more output.
                    self.wake()
            self.core.validate_state()
            self._events.turned()
        except Exception as failure:
            # The outermost handler: after any exception the node must stop.
            self._fail(failure)
            return
        self._arm_timer()

    def _watch_disk(self, now: float) -> None:
        self.disk_stall.observe(self.core.commit, self.core.stable, now)
        if self.disk_stall.is_stalled and self.core.is_leader:
            _log.critical("the disk completes no write, and other nodes have stored what it has not: this node stops leading")
            self.core.step_down()

    def _arm_timer(self) -> None:
        deadline = self.core.next_deadline()
        if self._timer is not None:
            if self._timer_at <= deadline:
                # Each heartbeat moves the deadline: one timer that fires early costs less than one per heartbeat.
                return
            self._timer.cancel()
        # A timer may fire a rounding error early: the floor prevents a busy loop.
        delay_s = max(deadline - self._clock.monotonic(), TIMER_S_MIN)
        self._timer_at = deadline
        self._timer = self._loop.call_later(delay_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self.wake()

    def _carry_out(self, ready: Ready) -> None:
        if ready.messages:
            self._events.send(ready.messages)
        if ready.must_persist or (ready.messages_after and (self._queue or self._writing)):
            # Messages may be lost; those that wait for a disk that hangs would pile up.
            if ready.must_persist or not self.disk_stall.is_stalled:
                self._queue.append(ready)
                self._queue_filled.set()
        elif ready.messages_after:
            self._events.send(ready.messages_after)
        for entry in ready.committed:
            self._events.applied(entry, self.replica.apply(entry))
        for read in ready.reads:
            self._events.read_ready(read.context, read.index)
        for context in ready.reads_lost:
            self._events.read_lost(context)
        if ready.snapshot_wanted and not self._making_snapshot:
            self._making_snapshot = True
            self._begin(self._make_snapshot())
        if ready.committed:
            self._save_later()

    # --- the disk ----------------------------------------------------------------------------------------------------

    async def _write_forever(self) -> None:
        while not self._stopped:
            await self._queue_filled.wait()
            self._queue_filled.clear()
            batch, self._queue = self._queue, []
            self._writing = True
            if batch:
                await self._write(batch)
            if self._compact_to:
                index, self._compact_to = self._compact_to, 0
                await self._background.run(partial(self._storage.log.compact, index))
            if self._is_mark_due and not self._queue:
                await self._mark()
            self._is_mark_due = False
            self._mark_later()
            self._writing = False
            self.wake()

    async def _mark(self) -> None:
        try:
            await self._background.run(self._storage.log.mark)
        except OSError as failure:
            if not lacks_resources(failure):
                raise
            # The entries are durable, only the proof of the last batch is missing; ``_mark_later`` tries again.
            _log.warning("the end of the raft log is not marked yet: %s", failure)

    def _mark_later(self) -> None:
        """Record the end of the log once no more writes follow: each batch proves that the one before it was durable."""
        if self._mark_timer is not None:
            self._mark_timer.cancel()
            self._mark_timer = None
        if not self._storage.log.is_marked and not self._stopped:
            self._mark_timer = self._loop.call_later(MARK_DELAY_S, self._mark_now)

    def _mark_now(self) -> None:
        self._mark_timer = None
        self._is_mark_due = True
        self._queue_filled.set()

    async def _write(self, batch: Sequence[Ready]) -> None:
        if any(ready.snapshot is not None for ready in batch):
            async with self._store_free:
                image = await self._background.run(lambda: self._storage.persist(batch))
                assert image is not None
                self.replica.restore(image)
                self._saved_index = image.index
                self._events.restored(image)
        elif any(ready.must_persist for ready in batch):
            began_at_s = self._clock.monotonic()
            await self._background.run(lambda: self._storage.persist(batch))
            self.log_write_seconds.observe(self._clock.monotonic() - began_at_s)
        for ready in batch:
            self.core.persisted(ready.number)
            if ready.messages_after:
                self._events.send(ready.messages_after)

    # --- the store ---------------------------------------------------------------------------------------------------

    def _save_later(self) -> None:
        if not self._saving:
            self._saving = True
            self._loop.call_later(SAVE_DELAY_S, self._begin_saving)

    def _begin_saving(self) -> None:
        if not self._stopped:
            self._begin(self._save())

    async def _save(self) -> None:
        async with self._store_free:
            self._saving = False
            await self._save_unsaved()
            if self._log_is_long():
                if await self._background.run(self._storage.store.checkpoint):
                    self._compact()
                else:
                    _log.warning("another process reads the database: the raft log is truncated when it has ended")

    async def _save_unsaved(self) -> None:
        replica = self.replica
        index, term, digest, changed = replica.index, replica.term, replica.digest.value, replica.take_unsaved()
        if index > self._saved_index:
            await self._background.run(lambda: self._storage.store.save(index, term, changed, digest))
            self._saved_index = index

    def _log_is_long(self) -> bool:
        log = self.core.log
        return len(log) > self._snapshot_entries or log.payload_bytes > self._snapshot_bytes

    def _compact(self) -> None:
        log = self.core.log
        kept = 0 if log.payload_bytes > self._snapshot_bytes else self._kept_entries
        index = min(self._saved_index, self.replica.index) - kept
        if index > log.base_index:
            self.core.compact(index)
            self._compact_to = index
            self._queue_filled.set()

    async def _make_snapshot(self) -> None:
        image = self.replica.image()
        content = await self._background.run(lambda: snapshot.encode(image))
        self._making_snapshot = False
        self.core.offer_snapshot(Snapshot(index=image.index, term=image.term, content=content))
        self.wake()

    # --- failure -----------------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        if not self._is_broken:
            self._is_broken = True
            self.stop()
            _log.critical("the metadata node is stopping: %s", failure, exc_info=failure)
            self._events.failed(failure)
