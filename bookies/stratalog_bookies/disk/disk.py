"""The asyncio shell of one disk: combines its core, group commit, files and reads.

A request that finds no room because the next log file is not ready is queued, in order, and continues when the file is. A
failed write or sync fails the disk permanently: waiting requests get STORAGE_FAILED, nothing is retried, and durable entries
remain readable. A disk that hangs refuses everything until it completes what it has begun: it may be late, it may have failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from stratalog_bookies.config import LOOKS_MAX, MAINTENANCE_CALLS, BookieSettings
from stratalog_bookies.disk.core.corruption import KnownCorruption
from stratalog_bookies.disk.core.disk_core import CONTROL_ITEMS_MAX, Added, DiskCore, Header, add_room, control_room
from stratalog_bookies.disk.core.index import Row
from stratalog_bookies.disk.core.log_format import PAGE_BYTES
from stratalog_bookies.disk.core.stall import StallWatch
from stratalog_bookies.disk.disk_calls import DiskCalls
from stratalog_bookies.disk.group_commit import GroupCommit
from stratalog_bookies.disk.log_file_lifecycle import LogFileLifecycle
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.disk.reads import DiskReads
from stratalog_bookies.metrics import Counters, DiskMetrics
from stratalog_bookies.protocol.messages import ENTRY_HEADER_BYTES, DiskInfo, LedgerTail, Status
from stratalog_core.errors import Corrupt, StorageFailed
from stratalog_core.ports import Background
from stratalog_core.transient_errors import lacks_resources

_log = logging.getLogger(__name__)
_FAILED = bytes([Status.STORAGE_FAILED if status == Status.OK else status for status in range(256)])

OnStatuses = Callable[[bytearray], None]
Item = TypeVar("Item")


class StatusGather:
    """Collects the statuses of a request whose entries are decided in parts; calls ``done`` when all parts have arrived."""

    def __init__(self, statuses: bytearray, parts: int, done: OnStatuses) -> None:
        self._statuses = statuses
        self._missing = parts
        self._done = done

    def part(self, first: int) -> OnStatuses:
        """The receiver of the statuses from position ``first`` on."""

        def receive(statuses: bytearray) -> None:
            self._statuses[first : first + len(statuses)] = statuses
            self._missing -= 1
            if not self._missing:
                self._done(self._statuses)

        return receive


class Disk:
    """One disk of a running bookie. ``on_change`` is called when the disk becomes writable or stops being writable.

    If ``is_missing``, the disk could not be used at start: what it holds is unknown, so nothing on it is absent.
    """

    def __init__(
        self,
        position: int,
        core: DiskCore,
        store: LogFiles,
        settings: BookieSettings,
        background: Background,
        counters: Counters,
        on_change: Callable[[], None],
        *,
        is_missing: bool = False,
    ) -> None:
        self.position = position
        self.is_missing = is_missing
        self.core = core
        self.store = store
        self.background = DiskCalls(background, MAINTENANCE_CALLS)
        self.counters = counters
        self.corruption = KnownCorruption()
        self.commit = GroupCommit(core, store, background, counters, self._after_group)
        self.files = LogFileLifecycle(core, store, settings, self.background, counters, self._room_changed)
        self._reading = DiskCalls(background, settings.read_jobs)
        self.reads = DiskReads(
            core, store, self._reading, self.background, counters, settings.read_jobs, settings.direct_read_bytes_min,
            self.note_corruption, self._note_lost_index,
        )  # fmt: skip
        self.on_group: Callable[[], None] = lambda: None
        self.on_corruption: Callable[[], None] = lambda: None
        self._settings = settings
        self._on_change = on_change
        self._stall = StallWatch(LOOKS_MAX)
        self._seen_sequence = 0
        self._proved_sequence = 0
        self._held: deque[tuple[int, bool, Callable[[], None]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Finish accepted work, then close the files."""
        self._prove_tail()
        await self.commit.close()
        await self.files.close()
        for task in list(self._tasks):
            task.cancel()
        await self.background.run(self.store.close)

    @property
    def add_bytes_max(self) -> int:
        """Maximum size of an ADD: it must fit into one log file."""
        return self.store.file_bytes - 2 * PAGE_BYTES

    # -- adds

    def add(
        self, headers: Sequence[Header], body: memoryview, header_at: int, payload_at: int, add_bytes: int, done: OnStatuses
    ) -> None:
        """``DiskCore.add`` of entries with ``add_bytes`` bytes of headers and payloads. Never blocks.

        ``done`` gets the statuses when all entries are decided and those that are OK are durable.
        """
        needed = add_room(len(headers), add_bytes)
        if needed > self.add_bytes_max and len(headers) > 1:
            self._add_in_halves(headers, body, header_at, payload_at, add_bytes, done)
        elif (self._held or not self.core.takes(needed)) and self.core.refusal is None:
            self._held.append((needed, True, partial(self._add_now, headers, body, header_at, payload_at, done)))
        else:
            self._add_now(headers, body, header_at, payload_at, done)

    def _add_in_halves(
        self, headers: Sequence[Header], body: memoryview, header_at: int, payload_at: int, add_bytes: int, done: OnStatuses
    ) -> None:
        """Add what may take more than one log file, if each entry gets a frame of its own."""
        middle = len(headers) // 2
        header_bytes, payload_bytes = middle * ENTRY_HEADER_BYTES, sum([header[3] for header in headers[:middle]])
        first_bytes = header_bytes + payload_bytes
        gather = StatusGather(bytearray(len(headers)), 2, done)
        self.add(headers[:middle], body, header_at, payload_at, first_bytes, gather.part(0))
        header_at, payload_at = header_at + header_bytes, payload_at + payload_bytes
        self.add(headers[middle:], body, header_at, payload_at, add_bytes - first_bytes, gather.part(middle))

    def _add_now(self, headers: Sequence[Header], body: memoryview, header_at: int, payload_at: int, done: OnStatuses) -> None:
        added = self.core.add(headers, body, header_at, payload_at)
        if not self.core.log.has_next_file:
            self.files.advance()
        if added.deferred:
            done = self._decide_later(added, headers, body, header_at, payload_at, done)
        self.commit.when_durable(added.sequence, partial(self._answer, added.statuses, done))

    def _answer(self, statuses: bytearray, done: OnStatuses) -> None:
        done(statuses.translate(_FAILED) if self.core.failure else statuses)

    def _decide_later(
        self, added: Added, headers: Sequence[Header], body: memoryview, header_at: int, payload_at: int, done: OnStatuses
    ) -> OnStatuses:
        """Once the decided entries are durable, load the runs that the others need and add those again, one at a time."""
        gather = StatusGather(bytearray(len(headers)), 1 + len(added.deferred), done)
        rest = gather.part(0)

        async def load_and_add() -> None:
            for index, run in added.deferred:
                part = gather.part(index)
                try:
                    await self.reads.load([run])
                except (OSError, Corrupt, StorageFailed) as failure:
                    part(bytearray((Status.OVERLOADED if lacks_resources(failure) else Status.STORAGE_FAILED,)))
                    continue
                at = payload_at + sum([header[3] for header in headers[:index]])
                single = headers[index : index + 1]
                self.add(single, body, header_at + index * ENTRY_HEADER_BYTES, at, ENTRY_HEADER_BYTES + single[0][3], part)

        def rest_is_durable(statuses: bytearray) -> None:
            rest(statuses)
            task = asyncio.get_running_loop().create_task(load_and_add())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return rest_is_durable

    # -- fences, LACs, deletions

    async def fence(self, ledger_ids: Sequence[int]) -> list[LedgerTail]:
        """Fence ledgers durably; returns their tails. Raises ``StorageFailed``."""
        await self._record(ledger_ids, self.core.fence)
        self.counters.fences += len(ledger_ids)
        return self.core.tails(ledger_ids)

    async def tails(self, ledger_ids: Sequence[int]) -> list[LedgerTail]:
        """Tails of ledgers; what they report is durable. Raises ``StorageFailed``."""
        await self.commit.durable(self.core.log.sequence)
        return self.core.tails(ledger_ids)

    async def write_lacs(self, lacs: Sequence[tuple[int, int]]) -> bytearray:
        """Record explicit LACs durably; none while the disk is full: they may be lost, and deletions need the space. Raises
        ``StorageFailed``.
        """
        if self.core.read_only and not (self.core.failure or self.core.stall):
            return bytearray((Status.READ_ONLY,)) * len(lacs)
        statuses = bytearray()

        def write(some: Sequence[tuple[int, int]]) -> int:
            written, sequence = self.core.write_lacs(some)
            statuses.extend(written)
            return sequence

        await self._record(lacs, write, reserve=True)
        return statuses

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        """Delete ledgers durably. Raises ``StorageFailed``."""
        await self._record(ledger_ids, self.core.delete)
        self.counters.ledgers_deleted += len(ledger_ids)
        self.files.wake()

    async def _record(self, items: Sequence[Item], record: Callable[[Sequence[Item]], int], *, reserve: bool = False) -> None:
        """Record control items durably, a frame's at a time: all of them may take more than one log file.

        ``record`` places some of them and returns the group to wait for.
        """
        sequence = 0
        for first in range(0, len(items), CONTROL_ITEMS_MAX):
            some = items[first : first + CONTROL_ITEMS_MAX]
            await self.room(control_room(len(some)), reserve=reserve)
            sequence = record(some)
        await self.commit.durable(sequence)

    async def room(self, needed: int, *, reserve: bool) -> None:
        """Wait until frames of ``needed`` bytes can be placed. Raises ``StorageFailed``."""
        core = self.core
        while not (core.failure or core.stall) and (self._held or not core.takes(needed, reserve=reserve)):
            if core.read_only and not self._held:
                raise StorageFailed(f"the disk is full: {core.read_only}", read_only=True)
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held.append((needed, reserve, partial(_resolve, room)))
            self.files.advance()
            await room
        if core.failure or core.stall:
            raise StorageFailed(core.failure or core.stall, read_only=False)

    # -- a disk that hangs

    def look(self) -> None:
        """Notice that the disk hangs, or that it works again. Called at regular intervals, whatever the disk does."""
        core = self.core
        writing = None if core.failure else core.log.writing
        preparing = self.files.preparing if self._held or core.stall else None
        self._stall.observe((writing, self._reading.oldest, preparing))
        if self._stall.is_stalled == bool(core.stall):
            return
        if self._stall.is_stalled:
            core.stall = f"the disk hangs: it has completed nothing for {self._settings.disk_stall_ms} ms"
            _log.critical("disk %d takes no adds and answers no reads for now: %s", self.position, core.stall)
            self.commit.give_up()
            self._reading.give_up(core.stall)
        else:
            core.stall = ""
            _log.warning("disk %d works again", self.position)
            self._reading.resume()
        self._room_changed()

    # -- damage

    def note_corruption(self, ledger_id: int, entry_id: int, generation: int) -> None:
        """Record that an entry cannot be read; ``entry_repair.py`` repairs it."""
        if self.corruption.add(ledger_id, entry_id, generation):
            self.counters.corrupt_entries += 1
            _log.error("entry %d of ledger %d, in log file %016x, is corrupt", entry_id, ledger_id, generation)
            self.on_corruption()

    def _note_lost_index(self, generation: int, reason: str) -> None:
        self.corruption.files.setdefault(generation, f"its index and its frames are corrupt: {reason}")

    def allow_compaction(self, generation: int) -> None:
        """Allow compaction of a file again: the entry that prevented it was repaired."""
        file = self.core.contents.files.get(generation)
        if file is not None:
            file.unmovable = False

    async def leave_file(self, generation: int) -> None:
        """Make sure that writes go to a newer file than this one. Raises ``StorageFailed``."""
        while self.core.log.generation == generation:
            await self.room(self.store.file_bytes, reserve=False)
            if self.core.log.generation == generation:
                self.core.roll()
        self.files.advance()

    async def write_again(self, ledger_id: int, row: Row, payload: bytes, generation: int) -> None:
        """Write a good copy, durably, of an entry whose copy in log file ``generation`` is corrupt. Raises
        ``StorageFailed``.
        """
        await self.leave_file(generation)
        await self.room(add_room(1, ENTRY_HEADER_BYTES + len(payload)), reserve=True)
        self.core.move(ledger_id, row, payload, generation)
        await self.commit.durable(self.core.log.sequence)

    def tick(self) -> None:
        """Called periodically: proves the tail of an idle log, so that later corruption is not mistaken for a torn write."""
        log = self.core.log
        if log.sequence == self._seen_sequence == log.durable_sequence:
            self._prove_tail()
        self._seen_sequence = log.sequence

    def _prove_tail(self) -> None:
        log = self.core.log
        if log.sequence > max(self._proved_sequence, 1):
            self.core.prove_tail()
            self._proved_sequence = self._seen_sequence = log.sequence
            self.commit.when_durable(log.sequence, lambda: None)

    # -- room

    def _after_group(self) -> None:
        self.files.advance()
        if self.core.failure:
            self._room_changed()
        self.on_group()

    def _room_changed(self) -> None:
        held, self._held = self._held, deque()
        while held:
            needed, reserve, call = held[0]
            if self.core.refusal is None and not self.core.takes(needed, reserve=reserve):
                break
            held.popleft()
            call()
        self._held = held + self._held
        self._on_change()

    def metrics(self) -> DiskMetrics:
        """Metric group of the disk, for one scrape."""
        info = self.info()
        return DiskMetrics(
            disk=str(self.position),
            writable=int(info.state == "writable"),
            failed=int(info.state == "failed"),
            free_bytes=info.free_bytes,
            log_files=info.log_files,
            log_size_bytes=info.log_bytes,
            live_bytes=info.live_bytes,
            ledgers=info.ledgers,
            unrepaired_entries=info.damaged_entries,
            group_commit_seconds=self.commit.seconds,
            group_commit_bytes=self.commit.bytes,
            waiting_for_commit=self.commit.waiting,
            waiting_for_room=len(self._held),
        )

    def info(self) -> DiskInfo:
        """The state of the disk for INFO."""
        files = self.core.contents.files.values()
        return DiskInfo(
            position=self.position,
            state="failed" if self.core.failure else "read_only" if self.core.refusal else "writable",
            reason=self.core.failure or self.core.stall or self.core.read_only,
            free_bytes=self.files.free_bytes,
            log_files=len(files),
            log_bytes=sum([file.end if file.end > 0 else self.core.log.tail for file in files]),
            live_bytes=sum([file.live_bytes for file in files]),
            ledgers=len(self.core.contents.ledgers),
            damaged_entries=len(self.corruption),
            damaged_files=len(self.corruption.files),
            sparse_files=len(self.core.contents.sparse_files(self._settings.compaction_live_ratio)),
            unmovable_files=sum([file.unmovable for file in files]),
        )


def _resolve(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
