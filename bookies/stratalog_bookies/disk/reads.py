"""Reading from one disk: what the index found is read by the kernel (``direct_reads.py``) or in the background, and checked.

A file is pinned from the moment an entry in it was found until it was read, so that it is not recycled in between. An entry
that cannot be read or does not match its CRC is reported as unreadable, and counted; it is never absent.
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
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.disk.recovery import make_index
from stratalog_bookies.disk.transient_errors import is_transient, lacks_resources
from stratalog_bookies.metrics import Counters
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import HEAD_BYTES_MAX, EntryState, Range
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Background, Buffer, File

_log = logging.getLogger(__name__)


Payload = TypeVar("Payload", bytes, memoryview)
OnCorruption = Callable[[int, int, int], None]
"""Told of an entry that cannot be read: ledger, entry, log file."""


class RangeRead(NamedTuple):
    """One range's part of an answer: what was found, packed headers with their states, payloads of those that are present."""

    found: Found
    headers: list[bytes]
    payloads: list[Buffer]


class DiskReads:
    """Reads of one disk, so many at a time as it has threads for."""

    def __init__(
        self,
        core: DiskCore,
        store: LogFiles,
        background: Background,
        counters: Counters,
        jobs: int,
        direct_bytes_min: int,
        on_corruption: OnCorruption,
        on_lost_index: Callable[[int, str], None],
    ) -> None:
        self._core = core
        self._store = store
        self._background = background
        self._counters = counters
        self._direct_bytes_min = direct_bytes_min
        self._on_corruption = on_corruption
        self._on_lost_index = on_lost_index
        self._slots = asyncio.Semaphore(jobs)
        self._direct = DirectReads(store, background)

    async def read(self, ranges: Sequence[Range], budget: Budget, head_bytes: int | None) -> list[RangeRead]:
        """Whole entries, or only the first ``head_bytes`` of each. Raises ``Corrupt`` or ``OSError`` if the index is lost."""
        async with self._slots:
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
        """None for what cannot be read. Raises ``OSError``."""
        if head_bytes is None and (pieces := pieces_of(places, self._direct_bytes_min)) is not None:
            views = await self._direct.read(pieces)
            if views is not None:
                self._counters.direct_reads += 1
                return [checked(place, view) for place, view in zip(places, views, strict=True)]
        return await self._background.run(partial(read_places, self._store, places, head_bytes))

    async def _locate(self, ranges: Sequence[Range], budget: Budget) -> list[Found]:
        while isinstance(found := locate(self._core, ranges, budget), RunsNeeded):
            await self.load(found.runs)
        self._core.contents.cache.trim()
        return found

    async def load(self, runs: Sequence[Run]) -> None:
        """Bring stored rows into memory, where they stay at least until the next trim. Raises ``Corrupt`` or ``OSError``.

        Runs that go meanwhile (their ledger was deleted, or compaction moved them) are left out: look again what is there.
        """
        contents = self._core.contents
        for run in runs:
            rows = await self.rows(run)
            if run.rows is None and contents.holds(run):
                contents.cache.keep(run, rows)

    async def load_missing(self, runs: Iterable[Run]) -> None:
        """``load`` of those that are not in memory."""
        await self.load([run for run in runs if run.rows is None])

    async def rows(self, run: Run) -> bytes:
        """Rows of a stored run, not kept in memory, empty if it has gone. Its file stays while they are read.

        An index that is damaged is made again from its log file first.
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
            return await self._background.run(partial(self._store.load_rows, run))
        except (Corrupt, OSError) as lost:
            if lacks_resources(lost):
                raise
            await self.rebuild_index(run.generation, str(lost))
        # An index that was made again tells nothing of a run that went meanwhile: it may lie elsewhere, or nowhere.
        return await self._background.run(partial(self._store.load_rows, run)) if self._core.contents.holds(run) else b""

    async def rebuild_index(self, generation: int, reason: str) -> None:
        """Make the index of a closed file again. Raises ``Corrupt`` or ``OSError`` if the file is damaged, too."""
        contents = self._core.contents
        file = contents.files.get(generation)
        if file is None or not file.closed:
            raise Corrupt(f"log file {generation:016x} has no index (any more): {reason}")
        _log.error("the index of log file %016x is damaged (%s): it is made again", generation, reason)
        contents.pin((generation,))
        try:
            rebuilt = await self._background.run(partial(make_index, self._store, generation, file.end))
        except (Corrupt, OSError) as failure:
            if not is_transient(failure):
                self._on_lost_index(generation, str(failure))
            raise
        finally:
            contents.unpin((generation,))
        for ledger_id, run in file.runs.items():
            again = rebuilt.get(ledger_id)
            if again is None or again.count != run.count:
                raise Corrupt(f"log file {generation:016x} holds other entries of ledger {ledger_id} than its index did")
            run.stored_at, run.stored_crc = again.stored_at, again.stored_crc

    async def has_newer(self, ledger_id: int, entry_id: int, generation: int) -> bool:
        """Whether a newer file than this one has the entry, too. Raises as ``load`` does."""
        while True:
            ledger = self._core.contents.ledgers.get(ledger_id)
            runs = [run for run in ledger.runs if run.generation > generation and run.may_hold(entry_id)] if ledger else []
            missing = [run for run in runs if run.rows is None]
            if not missing:
                return any(run.find(entry_id) is not None for run in runs)
            await self.load(missing)

    async def corrupt(self, ledger_id: int, entry_id: int) -> Place | None:
        """Where the entry is, if it exists and cannot be read. Raises as ``read`` does."""
        (found,) = await self._locate([Range(ledger_id, entry_id, entry_id)], Budget(1, 1))
        if not found.places:
            return None
        (place,) = found.places
        self._core.contents.pin((place.generation,))
        try:
            (payload,) = await self._background.run(partial(read_places, self._store, found.places, None))
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
    """Payloads (or their first ``head_bytes``) in order, None for what cannot be read or does not match its CRC. Blocking.

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
    """How much of a payload is read for its first ``head_bytes`` (None: for all of it): a size needs none."""
    if head_bytes == 0:
        return 0
    return row.payload_bytes if head_bytes is None or row.payload_bytes <= SMALL_BYTES_MAX else HEAD_BYTES_MAX


def _checked_head(place: Place, head: bytes) -> bytes | None:
    """The head of a payload, if it is the one that the index tells of."""
    if len(head) == HEAD_BYTES_MAX and crc32c(head) == place.row.head_crc:
        return head
    _log.error("the head of entry %d of ledger %d does not match its CRC", place.row.entry_id, place.ledger_id)
    return None


def checked(place: Place, payload: Payload) -> Payload | None:
    """The payload, if it is the one that the index tells of."""
    if len(payload) == place.row.payload_bytes and row_matches(place.ledger_id, place.row, payload):
        return payload
    _log.error("entry %d of ledger %d does not match its CRC", place.row.entry_id, place.ledger_id)
    return None


def row_matches(ledger_id: int, row: Row, payload: Buffer) -> bool:
    """Whether a payload is the one that the index tells of."""
    return messages.entry_crc(ledger_id, row.entry_id, row.lac, (payload,), row.payload_bytes) == row.crc


def _packed(place: Place, piece: Buffer | None) -> bytes:
    row = place.row
    state = EntryState.UNREADABLE if piece is None else EntryState.PRESENT
    return messages.ENTRY_HEADER.pack(place.ledger_id, row.entry_id, row.lac, row.payload_bytes, row.crc, state)
