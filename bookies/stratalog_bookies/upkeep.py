"""Slow work on one disk, paced: compaction of mostly dead files, and the scrub that checks every CRC.

Compaction writes what is alive in a file again through the ordinary group commit, and lets go of the file only when that is
durable. An entry that cannot be read stops it: the file is kept as evidence and as the place where the entry is known to
be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial

from stratalog_bookies.bookie import add_room
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.contents import LogFile
from stratalog_bookies.disk import Disk
from stratalog_bookies.disk_reads import read_places
from stratalog_bookies.index import Row, Run
from stratalog_bookies.messages import ENTRY_HEADER_BYTES
from stratalog_bookies.reading import Place
from stratalog_bookies.shortages import is_passing
from stratalog_core.errors import Corrupt, StorageFailed

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024


class Upkeep:
    """Compaction and scrub of one disk."""

    def __init__(self, disk: Disk, settings: BookieSettings) -> None:
        self._disk = disk
        self._contents = disk.bookie.contents
        self._settings = settings

    async def compact(self) -> None:
        """Empty the files of which too little is alive, sparsest first, as long as there is room."""
        for file in self._contents.sparse_files(self._settings.compaction_live_ratio):
            if self._disk.bookie.failure:
                return
            try:
                await self._compact_file(file)
            except StorageFailed as full:
                _log.warning("compaction waits: %s", full)
                return
            self._disk.files.wake()

    async def _compact_file(self, file: LogFile) -> None:
        self._contents.pin((file.generation,))
        try:
            for run in list(file.runs.values()):
                for rows in _chunks(await self._rows(run)):
                    await self._move(file, run, rows)
                    if file.unmovable:
                        return
            await self._disk.commit.durable(self._disk.bookie.log.sequence)
        except (Corrupt, OSError) as lost:
            if is_passing(lost):
                _log.warning("compaction waits: %s", lost)
                return
            file.unmovable = True
            _log.error("log file %016x cannot be compacted: %s", file.generation, lost)
            return
        finally:
            self._contents.unpin((file.generation,))
        self._contents.empty_file(file.generation)

    async def _move(self, file: LogFile, run: Run, rows: Sequence[Row]) -> None:
        places = [Place(run.ledger_id, file.generation, row) for row in rows]
        payloads = await self._disk.background.run(partial(read_places, self._disk.store, places, None))
        moved_bytes = 0
        for row, payload in zip(rows, payloads, strict=True):
            if payload is None:
                file.unmovable = True
                _log.error("log file %016x is kept: it has an unreadable entry of ledger %d", file.generation, run.ledger_id)
                return
            await self._disk.room(add_room(1, ENTRY_HEADER_BYTES + len(payload)), reserve=True)
            self._disk.bookie.move(run.ledger_id, row, payload, file.generation)
            moved_bytes += len(payload)
        self._disk.counters.compacted_bytes += moved_bytes
        await self._disk.commit.durable(self._disk.bookie.log.sequence)
        await asyncio.sleep(moved_bytes / self._settings.compaction_bytes_per_s)

    async def scrub(self) -> None:
        """Check every entry of the closed files once."""
        for generation in sorted(self._contents.files):
            file = self._contents.files.get(generation)
            if file is not None and file.closed:
                await self._scrub_file(file)

    async def _scrub_file(self, file: LogFile) -> None:
        for run in list(file.runs.values()):
            self._contents.pin((file.generation,))
            try:
                for rows in _chunks(await self._rows(run)):
                    await self._scrub_rows(file, run, rows)
            except (Corrupt, OSError) as lost:
                self._disk.counters.scrub_errors += 1
                _log.error("the index of log file %016x is damaged: %s", file.generation, lost)
            finally:
                self._contents.unpin((file.generation,))

    async def _scrub_rows(self, file: LogFile, run: Run, rows: Sequence[Row]) -> None:
        places = [Place(run.ledger_id, file.generation, row) for row in rows]
        payloads = await self._disk.background.run(partial(read_places, self._disk.store, places, None))
        scrubbed_bytes = sum([row.payload_bytes for row in rows])
        self._disk.counters.scrub_errors += payloads.count(None)
        self._disk.counters.scrubbed_bytes += scrubbed_bytes
        await asyncio.sleep(scrubbed_bytes / self._settings.scrub_bytes_per_s)

    async def _rows(self, run: Run) -> list[Row]:
        """Rows of a stored run, without keeping them in memory."""
        passing = Run(run.ledger_id, run.generation)
        passing.first, passing.last, passing.count = run.first, run.last, run.count
        passing.rows = run.rows or await self._disk.background.run(partial(self._disk.store.load_rows, run))
        return list(passing.between(run.first, run.last))


def _chunks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Cut rows into pieces of about a mebibyte of payload."""
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
