"""Reading from one disk: what the index found is read and checked in the background, never on the event loop.

A file is pinned from the moment an entry in it was found until it was read, so that it is not recycled in between. An entry
that cannot be read or does not match its CRC is reported as unreadable, and counted; it is never absent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from stratalog_bookies import messages
from stratalog_bookies.bookie import Bookie
from stratalog_bookies.counters import Counters
from stratalog_bookies.index import Row, Run
from stratalog_bookies.log_files import LogFiles
from stratalog_bookies.messages import EntryState, Range
from stratalog_bookies.reading import Budget, Found, Place, RunsNeeded, locate
from stratalog_bookies.shortages import lacks_resources
from stratalog_core.ports import Background, File

_log = logging.getLogger(__name__)


class RangeRead(NamedTuple):
    """One range's part of an answer: what was found, packed headers with their states, payloads of those that are present."""

    found: Found
    headers: list[bytes]
    payloads: list[bytes]


class DiskReads:
    """Reads of one disk, so many at a time as it has threads for."""

    def __init__(self, bookie: Bookie, store: LogFiles, background: Background, counters: Counters, jobs: int) -> None:
        self._bookie = bookie
        self._store = store
        self._background = background
        self._counters = counters
        self._slots = asyncio.Semaphore(jobs)

    async def read(self, ranges: Sequence[Range], budget: Budget, head_bytes: int | None) -> list[RangeRead]:
        """Whole entries, or only the first ``head_bytes`` of each. Raises ``Corrupt`` or ``OSError`` if the index is lost."""
        async with self._slots:
            found = await self._locate(ranges, budget)
            places = [place for each in found for place in each.places]
            generations = list({place.generation for place in places})
            self._bookie.contents.pin(generations)
            try:
                pieces = await self._background.run(partial(read_places, self._store, places, head_bytes))
            finally:
                self._bookie.contents.unpin(generations)
        return self._answers(found, pieces)

    async def _locate(self, ranges: Sequence[Range], budget: Budget) -> list[Found]:
        while isinstance(found := locate(self._bookie, ranges, budget), RunsNeeded):
            await self.load(found.runs)
        self._bookie.contents.cache.trim()
        return found

    async def load(self, runs: Sequence[Run]) -> None:
        """Bring stored rows into memory, where they stay at least until the next trim. Raises ``Corrupt`` or ``OSError``."""
        for run in runs:
            rows = await self._background.run(partial(self._store.load_rows, run))
            if run.rows is None:
                self._bookie.contents.cache.keep(run, rows)

    def _answers(self, found: Sequence[Found], pieces: Sequence[bytes | None]) -> list[RangeRead]:
        answers = []
        remaining = iter(pieces)
        for each in found:
            read = [next(remaining) for _ in each.places]
            headers = [_packed(place, piece) for place, piece in zip(each.places, read, strict=True)]
            answers.append(RangeRead(each, headers, [piece for piece in read if piece is not None]))
            self._counters.read_entries += len(read)
            self._counters.unreadable_entries += read.count(None)
        self._counters.read_bytes += sum([len(piece) for piece in pieces if piece is not None])
        return answers


def read_places(store: LogFiles, places: Sequence[Place], head_bytes: int | None) -> list[bytes | None]:
    """Payloads (or heads) in order, None for what cannot be read. Blocking.

    Raises ``OSError`` for want of a file descriptor or memory, which says nothing about the entries.
    """
    files: dict[int, File | None] = {}
    try:
        return [_read_place(store, files, place, head_bytes) for place in places]
    finally:
        for file in files.values():
            if file is not None:
                file.close()


def _read_place(store: LogFiles, files: dict[int, File | None], place: Place, head_bytes: int | None) -> bytes | None:
    row = place.row
    wanted = row.payload_bytes if head_bytes is None else min(row.payload_bytes, head_bytes)
    try:
        if place.generation not in files:
            files[place.generation] = None
            files[place.generation] = store.open_log(place.generation)
        file = files[place.generation]
        piece = None if file is None else file.pread(wanted, row.position)
    except OSError as failure:
        if lacks_resources(failure):
            raise
        _log.error("cannot read entry %d of ledger %d: %s", row.entry_id, place.ledger_id, failure)
        return None
    if piece is None or len(piece) != wanted or (head_bytes is None and not row_matches(place.ledger_id, row, piece)):
        _log.error("entry %d of ledger %d does not match its CRC", row.entry_id, place.ledger_id)
        return None
    return piece


def row_matches(ledger_id: int, row: Row, payload: bytes) -> bool:
    """Whether a payload is the one that the index tells of."""
    return messages.entry_crc(ledger_id, row.entry_id, row.lac, (payload,), row.payload_bytes) == row.crc


def _packed(place: Place, piece: bytes | None) -> bytes:
    row = place.row
    state = EntryState.UNREADABLE if piece is None else EntryState.PRESENT
    return messages.ENTRY_HEADER.pack(place.ledger_id, row.entry_id, row.lac, row.payload_bytes, row.crc, state)
