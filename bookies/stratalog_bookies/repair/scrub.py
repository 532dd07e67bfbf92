"""The scrub of one disk: checks every byte that is in use, at a bounded rate, and starts the repair of what is corrupt.

==========================  ==========================================================================================
corruption of               repair
==========================  ==========================================================================================
an entry's payload          the entry is copied from another replica (``entry_repair.py``)
a frame, a file's header    the file is closed, its live entries are moved, and it is recycled (``compaction.py``)
an index file               rebuilt from its log file
the state file, the cookie  rewritten from memory
==========================  ==========================================================================================

The open file is checked as far as it is durable. Fences, tombstones and LACs are in frames and in the state file, so they are
covered by both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.contents import LogFile
from stratalog_bookies.disk.core.cookie import COOKIE_FILE
from stratalog_bookies.disk.core.index import Run
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.protocol.messages import DiskScrub
from stratalog_bookies.repair.core.log_check import Checked, Copy, check_piece
from stratalog_core.errors import Corrupt, StratalogError
from stratalog_core.transient_errors import is_transient, lacks_resources

_log = logging.getLogger(__name__)
_PIECE_BYTES: Final = 1024 * 1024
_DEFAULT_BYTES_PER_S: Final = 8 * 1024 * 1024
_SHORTAGE_PAUSE_S: Final = 1.0


class Scrub:
    """Scrubs of one disk, one at a time. ``on_corruption`` wakes the repair; ``cookie`` is the correct
    content of the cookie file.
    """

    def __init__(self, disk: Disk, settings: BookieSettings, cookie: bytes, on_corruption: Callable[[], None]) -> None:
        self._disk = disk
        self._settings = settings
        self._cookie = cookie
        self._on_corruption = on_corruption
        self._wanted = asyncio.Event()
        self._running = False
        self._number = 0
        self._total_bytes = 0
        self._checked_bytes = 0
        self._checked_entries = 0
        self._found_before = 0
        self._repaired_before = 0
        self._repaired = 0
        self._place = ""
        """The file that is being checked, in words."""
        self._unchecked = ""

    async def run(self) -> None:
        """Scrub periodically and on request, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._settings.scrub_interval_s if self._settings.scrub_bytes_per_s else None):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            await self._scrub_safely()

    def start(self) -> None:
        """Start a scrub unless one is running. Also makes failed repairs due again."""
        if not self._running:
            self._running = True
            self._number += 1
            self._unchecked = ""
            self._wanted.set()
        self._disk.corruption.retry_all()
        self._on_corruption()

    async def _scrub_safely(self) -> None:
        try:
            await self.scrub()
        except (StratalogError, OSError) as failure:
            self._stopped(str(failure))
            _log.error("the scrub of disk %d is incomplete: %s", self._disk.position, self._unchecked)
        except Exception as defect:
            self._stopped(f"unexpected {type(defect).__name__}; see the bookie's log")
            _log.exception("the scrub of disk %d failed unexpectedly", self._disk.position)
        finally:
            self._running = False

    def _stopped(self, reason: str) -> None:
        self._unchecked = f"it stopped at {self._place}, after {self._checked_bytes} of {self._total_bytes} bytes: {reason}"

    async def scrub(self) -> None:
        """Check everything once. Raises ``OSError`` or ``StratalogError`` if the disk fails."""
        disk, contents = self._disk, self._disk.core.contents
        if not self._running:
            self._running = True
            self._number += 1
        self._begin()
        self._place = "the cookie"
        await self._check_cookie()
        self._place = "the state file"
        await disk.files.check_state()
        for generation in sorted(contents.files):
            file = contents.files.get(generation)
            if file is not None:
                self._place = f"log file {generation:016x}"
                contents.pin((generation,))
                try:
                    await self._check_file(file)
                finally:
                    contents.unpin((generation,))
        self._running = False

    def _begin(self) -> None:
        files = self._disk.core.contents.files.values()
        self._total_bytes = sum([max(self._end_of(file) - log_format.FIRST_FRAME, 0) for file in files])
        self._checked_bytes = self._checked_entries = self._repaired = 0
        self._unchecked = ""
        self._found_before, self._repaired_before = self._disk.corruption.found, self._disk.corruption.repaired

    def status(self) -> DiskScrub:
        """Progress of the running scrub, or the result of the last one."""
        corruption = self._disk.corruption
        return DiskScrub(
            position=self._disk.position,
            number=self._number,
            running=self._running,
            total_bytes=self._total_bytes,
            checked_bytes=self._checked_bytes,
            checked_entries=self._checked_entries,
            damaged_entries=corruption.found - self._found_before,
            healed_entries=corruption.repaired - self._repaired_before,
            waiting_entries=len(corruption),
            untried_entries=corruption.untried,
            broken_files=len(corruption.files),
            repaired_files=self._repaired,
            examples=tuple(corruption.examples(10)),
            unchecked=self._unchecked,
        )

    # -- files

    async def _check_cookie(self) -> None:
        if await self._disk.background.run(partial(self._disk.store.repair_file, COOKIE_FILE, self._cookie)):
            self._repaired += 1
            _log.error("the cookie of disk %d was corrupt and has been rewritten", self._disk.position)

    async def _check_file(self, file: LogFile) -> None:
        if file.closed and file.runs:
            await self._check_index(file)
        broken = await self._broken(file)
        if broken:
            self._note_broken(file, broken)

    def _note_broken(self, file: LogFile, reason: str) -> None:
        if file.generation not in self._disk.corruption.files:
            self._disk.counters.scrub_errors += 1
            self._disk.corruption.files[file.generation] = reason
            _log.error("log file %016x is corrupt (%s); its entries are moved to another file", file.generation, reason)
            self._on_corruption()

    async def _check_index(self, file: LogFile) -> None:
        try:
            await self._disk.background.run(partial(_load_index, self._disk.store, file.generation, list(file.runs.values())))
        except (Corrupt, OSError) as lost:
            if lacks_resources(lost):
                self._unchecked = self._unchecked or f"the index of {self._place} was not checked: {lost}"
                return
            self._disk.counters.scrub_errors += 1
            await self._repair_index(file, str(lost))

    async def _repair_index(self, file: LogFile, reason: str) -> None:
        try:
            await self._disk.reads.rebuild_index(file.generation, reason)
        except (Corrupt, OSError) as failure:
            if not is_transient(failure):
                self._note_broken(file, f"its index cannot be rebuilt: {failure}")
        else:
            self._repaired += 1

    # -- frames

    async def _broken(self, file: LogFile) -> str:
        """Check all frames and record corrupt entries. Returns what is corrupt about the file itself, if anything."""
        disk, position = self._disk, log_format.FIRST_FRAME
        try:
            await disk.background.run(partial(disk.store.check_header, file.generation))
            while position < (end := self._end_of(file)):
                checked = await disk.background.run(partial(_check, disk.store, file.generation, position, end))
                await self._note(file, checked, checked.end - position)
                if checked.broken:
                    return f"no intact frame at byte {checked.end}"
                position = checked.end
        except Corrupt as corruption:
            return corruption.message
        except OSError as failure:
            if not lacks_resources(failure):
                return str(failure)
            self._unchecked = self._unchecked or f"{self._place} was not checked from byte {position} on: {failure}"
            await asyncio.sleep(_SHORTAGE_PAUSE_S)
        return ""

    def _end_of(self, file: LogFile) -> int:
        """Position up to which the file is durable."""
        log = self._disk.core.log
        if file.generation == log.durable_generation and not file.closed:
            return log.durable_position
        return max(file.end, 0) if file.generation <= log.durable_generation else 0

    async def _note(self, file: LogFile, checked: Checked, checked_bytes: int) -> None:
        self._checked_bytes += checked_bytes
        self._checked_entries += checked.entries
        self._disk.counters.scrubbed_bytes += checked_bytes
        for copy in checked.corrupt:
            if await self._may_be_current(file, copy):
                self._disk.counters.scrub_errors += 1
                self._disk.note_corruption(copy.ledger_id, copy.entry_id, file.generation)
        await asyncio.sleep(checked_bytes / (self._settings.scrub_bytes_per_s or _DEFAULT_BYTES_PER_S))

    async def _may_be_current(self, file: LogFile, copy: Copy) -> bool:
        """``_is_current``; also True if an index needed to decide is lost: the repair checks again."""
        try:
            return await self._is_current(file, copy)
        except (Corrupt, OSError) as lost:
            _log.info("entry %d of ledger %d is assumed to be live: %s", copy.entry_id, copy.ledger_id, lost)
            return True

    async def _is_current(self, file: LogFile, copy: Copy) -> bool:
        """Whether reads use this copy: its ledger exists, and no newer file has the entry."""
        run = file.runs.get(copy.ledger_id)
        if run is None:
            return False
        await self._disk.reads.load_missing([run])
        if not self._disk.core.contents.holds(run):
            return False
        row = run.find(copy.entry_id)
        if row is None or row.position != copy.position:
            return False
        return not await self._disk.reads.has_newer(copy.ledger_id, copy.entry_id, file.generation)


def _check(store: LogFiles, generation: int, position: int, end: int) -> Checked:
    """Check at least one frame from ``position`` on. Blocking."""
    file = store.open_log(generation)
    try:
        content = file.pread(min(_PIECE_BYTES, end - position), position)
        claimed = log_format.claimed_bytes(memoryview(content), 0)
        if len(content) < claimed <= end - position:
            content = file.pread(claimed, position)
    finally:
        file.close()
    if not content:
        return Checked(position, 0, [], True)
    return check_piece(memoryview(content), position, store.seed(generation))


def _load_index(store: LogFiles, generation: int, runs: list[Run]) -> None:
    """Raise ``Corrupt`` or ``OSError`` if the stored index is unusable. Blocking."""
    store.load_index(generation)
    for run in runs:
        store.load_rows(run)
