"""Reads from one disk: finds entries in the index, reads them by the kernel (``direct_reads.py``) or a thread, checks them.

A file is pinned from the lookup of an entry until the entry is read, so that it is not recycled in between. An entry that is
unreadable or does not match its CRC is reported as unreadable, counted and repaired; it is never reported as absent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from crc32c import crc32c

from stratalog_bookies.disk.core.disk_core import DiskCore
from stratalog_bookies.disk.core.extents import pieces_of
from stratalog_bookies.disk.core.index import SMALL_BYTES_MAX, Row, Run
from stratalog_bookies.disk.core.lookup import Budget, Found, Place, RunsNeeded, locate
from stratalog_bookies.disk.direct_reads import DirectReads
from stratalog_bookies.disk.disk_calls import DiskCalls
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.disk.recovery import make_index
from stratalog_bookies.metrics import Counters
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import HEAD_BYTES_MAX, EntryState, Range
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Background, Buffer, File
from stratalog_core.single_flight import SingleFlight
from stratalog_core.transient_errors import is_transient, lacks_resources

_log = logging.getLogger(__name__)


Payload = TypeVar("Payload", bytes, memoryview)
OnCorruption = Callable[[int, int, int], None]
"""Called with ledger, entry and log file of an entry that cannot be read."""


class RangeRead(NamedTuple):
    """One range's part of an answer: the lookup, packed headers with their states, and the payloads of readable entries."""

    found: Found
    headers: list[bytes]
    payloads: list[Buffer]


class DiskReads:
    """Reads of one disk. At most ``jobs`` run at a time."""

    def __init__(
        self,
        core: DiskCore,
        store: LogFiles,
        calls: DiskCalls,
        background: Background,
        counters: Counters,
        jobs: int,
        direct_bytes_min: int,
        on_corruption: OnCorruption,
        on_lost_index: Callable[[int, str], None],
    ) -> None:
        self._core = core
        self._store = store
        self._calls = calls
        self._background = background
        self._counters = counters
        self._direct_bytes_min = direct_bytes_min
        self._on_corruption = on_corruption
        self._on_lost_index = on_lost_index
        self._slots = asyncio.Semaphore(jobs)
        self._direct = DirectReads(store, calls)
        self._rebuilds: SingleFlight[int, None] = SingleFlight()
        self.lost_indexes: dict[int, str] = {}
        """Files whose index could not be rebuilt, and why: each attempt reads the whole file. A scrub tries again."""

    async def read(self, ranges: Sequence[Range], budget: Budget, head_bytes: int | None) -> list[RangeRead]:
        """Whole entries, or the first ``head_bytes`` of each. Raises ``Corrupt`` or ``OSError`` if the index is lost,
        ``StorageFailed`` while the disk hangs.
        """
        self._calls.check()
        async with self._slots:
            self._calls.check()
            found = await self._locate(ranges, budget)
            places = [place for each in found for place in each.places]
            generations = list({place.generation for place in places})
            self._core.contents.pin(generations)
            try:
                pieces = await self._payloads(places, head_bytes)
            finally:
                self._core.contents.unpin(generations)
        return self._answers(found, pieces)

    async def _payloads(self, places: Sequence[Place], head_bytes: int | None) -> Sequence[Buffer | None]:
        """Payloads, None for unreadable ones. Raises ``OSError``."""
        if head_bytes is None and (pieces := pieces_of(places, self._direct_bytes_min)) is not None:
            views = await self._direct.read(pieces)
            if views is not None:
                self._counters.direct_reads += 1
                return [checked(place, view) for place, view in zip(places, views, strict=True)]
        return await self._calls.run(partial(read_places, self._store, places, head_bytes))

    async def _locate(self, ranges: Sequence[Range], budget: Budget) -> list[Found]:
        while isinstance(found := locate(self._core, ranges, budget), RunsNeeded):
            await self.load(found.runs)
        self._core.contents.cache.trim()
        return found

    async def load(self, runs: Sequence[Run]) -> None:
        """Load the rows of stored runs; they stay in memory at least until the next trim. Raises ``Corrupt`` or ``OSError``.

        Skips runs that are removed meanwhile by a deletion or by compaction; look the entries up again.
        """
        contents = self._core.contents
        for run in runs:
            rows = await self.rows(run)
            if run.rows is None and contents.holds(run):
                contents.cache.keep(run, rows)

    async def load_missing(self, runs: Iterable[Run]) -> None:
        """``load`` for the runs that are not in memory."""
        await self.load([run for run in runs if run.rows is None])

    async def rows(self, run: Run) -> bytes:
        """Rows of a stored run, without caching them; empty if the run was removed. Pins its file.

        Rebuilds a corrupt index from its log file first.
        """
        contents = self._core.contents
        if not contents.holds(run):
            return b""
        contents.pin((run.generation,))
        try:
            return await self._stored_rows(run)
        finally:
            contents.unpin((run.generation,))

    async def _stored_rows(self, run: Run) -> bytes:
        try:
            return await self._calls.run(partial(self._store.load_rows, run))
        except (Corrupt, OSError) as lost:
            if lacks_resources(lost):
                raise
            if run.generation in self.lost_indexes:
                raise Corrupt(self.lost_indexes[run.generation]) from lost
            await self.rebuild_index(run.generation, str(lost))
        # If the run was removed while the index was rebuilt, its rows are elsewhere or gone.
        return await self._calls.run(partial(self._store.load_rows, run)) if self._core.contents.holds(run) else b""

    async def rebuild_index(self, generation: int, reason: str) -> None:
        """Rebuild the index of a closed file, once for all that need it now. Raises ``Corrupt`` or ``OSError`` if the file is
        corrupt as well.
        """
        await self._rebuilds.get(generation, partial(self._rebuild_index, generation, reason), keep=True)

    async def _rebuild_index(self, generation: int, reason: str) -> None:
        contents = self._core.contents
        file = contents.files.get(generation)
        if file is None or not file.closed:
            raise Corrupt(f"log file {generation:016x} has no index: {reason}")
        _log.error("the index of log file %016x is corrupt (%s) and is rebuilt", generation, reason)
        contents.pin((generation,))
        try:
            # It reads a whole log file: a disk is not taken for one that hangs because that takes long.
            rebuilt = await self._background.run(partial(make_index, self._store, generation, file.end))
            for ledger_id, run in file.runs.items():
                again = rebuilt.get(ledger_id)
                if again is None or again.count != run.count:
                    raise Corrupt(f"log file {generation:016x} and its index disagree about the entries of ledger {ledger_id}")
                run.stored_at, run.stored_crc = again.stored_at, again.stored_crc
        except (Corrupt, OSError) as failure:
            if not is_transient(failure):
                self.lost_indexes[generation] = str(failure)
                self._on_lost_index(generation, str(failure))
            raise
        finally:
            contents.unpin((generation,))
        self.lost_indexes.pop(generation, None)

    async def has_newer(self, ledger_id: int, entry_id: int, generation: int) -> bool:
        """Whether a newer file also holds the entry. Raises as ``load`` does."""
        while True:
            ledger = self._core.contents.ledgers.get(ledger_id)
            runs = [run for run in ledger.runs if run.generation > generation and run.may_hold(entry_id)] if ledger else []
            missing = [run for run in runs if run.rows is None]
            if not missing:
                return any(run.find(entry_id) is not None for run in runs)
            await self.load(missing)

    async def corrupt(self, ledger_id: int, entry_id: int) -> Place | None:
        """The place of an entry that exists and cannot be read; else None. Raises as ``read`` does."""
        (found,) = await self._locate([Range(ledger_id, entry_id, entry_id)], Budget(1, 1))
        if not found.places:
            return None
        (place,) = found.places
        self._core.contents.pin((place.generation,))
        try:
            (payload,) = await self._calls.run(partial(read_places, self._store, found.places, None))
        finally:
            self._core.contents.unpin((place.generation,))
        return place if payload is None else None

    def _answers(self, found: Sequence[Found], pieces: Sequence[Buffer | None]) -> list[RangeRead]:
        answers = []
        remaining = iter(pieces)
        for each in found:
            read = [next(remaining) for _ in each.places]
            headers = [_packed(place, piece) for place, piece in zip(each.places, read, strict=True)]
            answers.append(RangeRead(each, headers, [piece for piece in read if piece is not None]))
            self._counters.read_entries += len(read)
            if None in read:
                self._note(each.places, read)
        self._counters.read_bytes += sum([len(piece) for piece in pieces if piece is not None])
        return answers

    def _note(self, places: Sequence[Place], read: Sequence[Buffer | None]) -> None:
        self._counters.unreadable_entries += read.count(None)
        for place, piece in zip(places, read, strict=True):
            if piece is None:
                self._on_corruption(place.ledger_id, place.row.entry_id, place.generation)


def read_places(store: LogFiles, places: Sequence[Place], head_bytes: int | None) -> list[bytes | None]:
    """Payloads (or their first ``head_bytes``) in order; None if unreadable or not matching the CRC. Blocking.

    Raises ``OSError`` for lack of a file descriptor or memory, which says nothing about the entries.
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
    wanted = _bytes_to_check(row, head_bytes)
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
    if piece is None or head_bytes == 0:
        return piece
    sound = checked(place, piece) if wanted == row.payload_bytes else _checked_head(place, piece)
    return sound if head_bytes is None or sound is None else sound[:head_bytes]


def _bytes_to_check(row: Row, head_bytes: int | None) -> int:
    """Number of bytes to read for the first ``head_bytes`` of a payload (None: all of it; 0: only the size is wanted)."""
    if head_bytes == 0:
        return 0
    return row.payload_bytes if head_bytes is None or row.payload_bytes <= SMALL_BYTES_MAX else HEAD_BYTES_MAX


def _checked_head(place: Place, head: bytes) -> bytes | None:
    """The head of a payload if it matches the CRC in the index; else None."""
    if len(head) == HEAD_BYTES_MAX and crc32c(head) == place.row.head_crc:
        return head
    _log.error("the head of entry %d of ledger %d does not match its CRC", place.row.entry_id, place.ledger_id)
    return None


def checked(place: Place, payload: Payload) -> Payload | None:
    """The payload if it matches the CRC in the index; else None."""
    if len(payload) == place.row.payload_bytes and row_matches(place.ledger_id, place.row, payload):
        return payload
    _log.error("entry %d of ledger %d does not match its CRC", place.row.entry_id, place.ledger_id)
    return None


def row_matches(ledger_id: int, row: Row, payload: Buffer) -> bool:
    """Whether a payload matches the CRC in the index."""
    return messages.entry_crc(ledger_id, row.entry_id, row.lac, (payload,), row.payload_bytes) == row.crc


def _packed(place: Place, piece: Buffer | None) -> bytes:
    row = place.row
    state = EntryState.UNREADABLE if piece is None else EntryState.PRESENT
    return messages.ENTRY_HEADER.pack(place.ledger_id, row.entry_id, row.lac, row.payload_bytes, row.crc, state)
