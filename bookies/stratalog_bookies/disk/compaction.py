"""Compaction of one disk: empties files that are mostly dead and files with corrupt frames, at a bounded rate.

Live entries are written again through the ordinary group commit, and the old file is freed only when the copies are durable. A
file with an unreadable entry is kept until the entry is repaired: it records that the entry exists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk.core.contents import LogFile
from stratalog_bookies.disk.core.disk_core import add_room
from stratalog_bookies.disk.core.index import Row, Run
from stratalog_bookies.disk.core.lookup import Place
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.reads import read_places
from stratalog_bookies.protocol.messages import ENTRY_HEADER_BYTES
from stratalog_core.errors import Corrupt, StorageFailed
from stratalog_core.transient_errors import is_transient

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024


class Compaction:
    """Compaction of one disk."""

    def __init__(self, disk: Disk, settings: BookieSettings) -> None:
        self._disk = disk
        self._contents = disk.core.contents
        self._settings = settings
        self._lock = asyncio.Lock()

    async def compact(self) -> None:
        """Empty the files with too few live bytes, sparsest first, until there is no room."""
        for file in self._contents.sparse_files(self._settings.compaction_live_ratio):
            if self._disk.core.failure:
                return
            try:
                await self._empty(file)
            except StorageFailed as full:
                _log.warning("compaction is waiting: %s", full)
                return

    async def empty_corrupt_files(self) -> None:
        """Empty the files whose frames are corrupt. Raises ``StorageFailed`` if there is no room."""
        broken = self._disk.corruption.files
        lost_indexes = self._disk.reads.lost_indexes
        for generation in list(broken):
            file = self._contents.files.get(generation)
            if file is None:
                del broken[generation]
                lost_indexes.pop(generation, None)
            elif not file.closed:
                await self._disk.leave_file(generation)
                await self._disk.commit.durable(self._disk.core.log.sequence)
                self._disk.files.advance()
            elif file.unmovable and (self._disk.corruption.holds(generation) or generation in lost_indexes):
                continue  # Walking through it again and again would find only what waits for its repair, or for a scrub.
            elif await self._empty(file):
                _log.warning("log file %016x had corrupt frames; its entries were copied to a newer file", generation)
                self._disk.counters.repaired_files += 1
                broken.pop(generation, None)

    async def _empty(self, file: LogFile) -> bool:
        """Copy the live entries of a closed file to the open one. Returns whether all were copied. Raises ``StorageFailed``."""
        async with self._lock:
            if self._contents.files.get(file.generation) is not file or not file.runs:
                # Its ledgers were deleted while it was queued; it is freed, or will be soon.
                return True
            self._contents.pin((file.generation,))
            try:
                file.unmovable = not await self._move_all(file)
                await self._disk.commit.durable(self._disk.core.log.sequence)
            except (Corrupt, OSError) as lost:
                if not is_transient(lost):
                    file.unmovable = True
                _log.error("log file %016x cannot be compacted: %s", file.generation, lost)
                return False
            finally:
                self._contents.unpin((file.generation,))
            if not file.unmovable:
                self._contents.empty_file(file.generation)
                self._disk.files.wake()
            return not file.unmovable

    async def _move_all(self, file: LogFile) -> bool:
        whole = True
        for run in list(file.runs.values()):
            for rows in _chunks(await self._rows(run)):
                if not self._contents.holds(run):
                    break  # The ledger was deleted while the rows were read.
                whole = await self._move(file, run, rows) and whole
        return whole

    async def _move(self, file: LogFile, run: Run, rows: Sequence[Row]) -> bool:
        disk, generation = self._disk, file.generation
        wanted = [row for row in rows if await self._is_needed(run.ledger_id, row.entry_id, generation)]
        places = [Place(run.ledger_id, generation, row) for row in wanted]
        payloads = await disk.background.run(partial(read_places, disk.store, places, None))
        moved_bytes = 0
        for row, payload in zip(wanted, payloads, strict=True):
            replaced = max(generation, disk.corruption.generation_of(run.ledger_id, row.entry_id))
            if payload is None:
                disk.note_corruption(run.ledger_id, row.entry_id, replaced)
                continue
            if replaced > generation:
                await disk.leave_file(replaced)
            await disk.room(add_room(1, ENTRY_HEADER_BYTES + len(payload)), reserve=True)
            disk.core.move(run.ledger_id, row, payload, replaced)
            moved_bytes += len(payload)
        disk.counters.compacted_bytes += moved_bytes
        await disk.commit.durable(disk.core.log.sequence)
        await asyncio.sleep(moved_bytes / self._settings.compaction_bytes_per_s)
        return None not in payloads

    async def _is_needed(self, ledger_id: int, entry_id: int, generation: int) -> bool:
        """Whether the copy in a file is the newest, or a newer one is known to be corrupt."""
        if self._disk.corruption.generation_of(ledger_id, entry_id) > generation:
            return True
        return not await self._disk.reads.has_newer(ledger_id, entry_id, generation)

    async def _rows(self, run: Run) -> list[Row]:
        """Rows of a stored run, without caching them; none if its ledger was deleted."""
        passing = Run(run.ledger_id, run.generation)
        passing.first, passing.last, passing.count = run.first, run.last, run.count
        passing.rows = run.rows or await self._disk.reads.rows(run)
        return list(passing.between(run.first, run.last)) if passing.rows else []


def _chunks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Split rows into chunks of about 1 MiB of payload."""
    chunk: list[Row] = []
    chunk_bytes = 0
    for row in rows:
        chunk.append(row)
        chunk_bytes += row.payload_bytes
        if chunk_bytes >= _CHUNK_BYTES or len(chunk) >= 1024:
            yield chunk
            chunk, chunk_bytes = [], 0
    if chunk:
        yield chunk
