"""Reads of cold history for brokers: by offset, by time, and the state that a new owner needs at its end.

A fetch goes from pointer to manifest to segment to blocks, each cached. At its deadline it returns what is ready; the load it
waited for continues, so that a retry finds it in the cache. Sequential readers are recognised by the offset at which they
continue and get read-ahead, which doubles while it is used and halves when its blocks were evicted unused. ``block_source.py``
verifies, caches and bounds the blocks.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, TypeVar
from uuid import UUID

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.batches.checkpoint import Checkpoint, ProducerEntry
from stratalog_core.errors import Corrupt, NotFound, StratalogError, Unavailable
from stratalog_core.metrics.groups import MetricGroup
from stratalog_core.partition_state.transactions import aborted_between
from stratalog_core.ports import Background, Buffer, Clock, Files
from stratalog_core.search_pool import InlineBackground, SearchPool
from stratalog_core.single_flight import SingleFlight
from stratalog_metadata.records import ManifestPointer, Topic
from stratalog_tiering.cold.block_cache import BlockKey, LruCache
from stratalog_tiering.cold.block_source import BlockSource, ColdReaderSettings, block_key
from stratalog_tiering.cold.manifest_source import Found, ManifestSource
from stratalog_tiering.core.forks import find_fork, fork_error
from stratalog_tiering.format.coordinator_state import decode_state
from stratalog_tiering.format.footer import SegmentFooter
from stratalog_tiering.format.manifest import PageRef, SegmentEntry
from stratalog_tiering.format.object_keys import is_marker, manifests_prefix, parse_state_key
from stratalog_tiering.format.segment import find_block, iterate_block_batches
from stratalog_tiering.store import ObjectStore

LOOKUP_TIMEOUT_S: Final = 30.0
MEMORY_BYTES: Final = 64 * 1024 * 1024
_STREAMS_MAX: Final = 1024
_READ_AHEADS_MAX: Final = 64
_SHARES_S: Final = 2.0
"""How long after its last fetch a sequential reader has a share of the memory."""
_log = logging.getLogger(__name__)
_Read = TypeVar("_Read")


AbortedRange = tuple[int, int, int]
"""Producer id, first offset and last offset, the marker's, of an aborted transaction."""


def _aborted_in(footer: SegmentFooter, from_offset: int, to_offset: int) -> set[AbortedRange]:
    overlapping = aborted_between(footer.aborted_transactions, from_offset, to_offset)
    return {(aborted.producer_id, aborted.first_offset, aborted.last_offset) for aborted in overlapping}


def _require_from_start(pointer: ManifestPointer, offset: int) -> None:
    if offset < pointer.start_offset:
        raise NotFound(f"offset {offset} is below the cold history's start {pointer.start_offset}")


def _by_first_offset(aborted: AbortedRange) -> int:
    return aborted[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRecord:
    """A record found by its timestamp."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


@dataclass(slots=True)
class _Stream:
    """A sequential reader, identified by the offset at which it continues. ``window``: blocks to read ahead, at first 0.

    ``refill_at`` is the offset from which at most half of what was read ahead is left, so that blocks are read several at once.
    ``used_s``: when its last fetch ended (monotonic seconds).
    """

    window: int = 0
    ahead_until: int = 0
    refill_at: int = 0
    used_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Fetch:
    """One fetch in progress. ``missed``: a block that was read ahead was evicted before it was used."""

    pointer: ManifestPointer
    deadline: float
    stream: _Stream
    started: list[BlockKey] = field(default_factory=list)
    batches: list[Buffer] = field(default_factory=list)
    base_offsets: array[int] = field(default_factory=lambda: array("q"))
    missed: bool = False


class ColdReader:
    """One per process, within ``memory_bytes``: a quarter for manifests, pages and footers, the rest for blocks.

    ``files`` is needed for the disk cache only and is emptied at the start. ``background`` and ``searches`` run what would
    block the event loop.
    """

    def __init__(
        self,
        store: ObjectStore,
        settings: ColdReaderSettings,
        clock: Clock,
        *,
        memory_bytes: int = MEMORY_BYTES,
        files: Files | None = None,
        background: Background | None = None,
        searches: SearchPool | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._searches = searches or SearchPool(InlineBackground(), memory_bytes)
        self._source = ManifestSource(store, memory_bytes // 4, background)
        self._blocks = BlockSource(store, self._source.cipher, settings, clock, memory_bytes // 4 * 3, files, background)
        self._lookups: SingleFlight[tuple[str, str, int], Found] = SingleFlight()
        self._streams: LruCache[tuple[UUID, int, int], _Stream] = LruCache(_STREAMS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()

    def metrics(self) -> Iterator[MetricGroup]:
        """For a scrape."""
        yield self._blocks.metrics()

    async def refuse_fork(self, topic: Topic, partition: int, pointer: ManifestPointer | None) -> None:
        """Raise ``Forked`` if the store has a newer committed version than ``pointer``, metadata's, or ``Unavailable``."""
        known = {pointer.manifest_version: pointer.object_key} if pointer is not None else {0: ""}
        async for info in self._store.list(manifests_prefix(topic.topic_id, partition)):
            if is_marker(info.key):
                fork = find_fork([info], known)
                if fork is not None:
                    raise fork_error(fork, topic.name, partition)
                return

    async def locked_until_ms(self, pointer: ManifestPointer, end_offset: int) -> int:
        """Wall time until which a segment with records below ``end_offset`` is locked; 0: none is. Raises ``Unavailable``."""
        until_ms = 0
        async for entry in self._source.segments(await self._source.manifest(pointer)):
            if entry.base_offset >= end_offset:
                break
            until_ms = max(until_ms, entry.options.lock_until_ms)
        return until_ms

    async def fetch(self, pointer: ManifestPointer, offset: int, max_bytes: int, timeout_s: float) -> BatchRun:
        """Whole batches in order, the first one holding ``offset``; at least one whatever ``max_bytes``.

        Returns fewer bytes if the history ends, if no more was ready in time, or if what follows cannot be read, and nothing at
        or beyond the end. Raises ``Unavailable`` if nothing is ready within ``timeout_s`` (the load continues), ``NotFound``
        below the start, ``Corrupt`` that names segment, block and offsets.
        """
        _require_from_start(pointer, offset)
        work = _Fetch(pointer=pointer, deadline=self._clock.monotonic() + timeout_s, stream=self._stream_at(pointer, offset))
        next_offset = offset
        try:
            next_offset = await self._gather(work, offset, max_bytes)
        except asyncio.CancelledError:
            self._blocks.abandon(work.started)
            raise
        finally:
            self._continue_stream(work, offset, next_offset)
        return BatchRun(work.batches, work.base_offsets, next_offset)

    async def _gather(self, work: _Fetch, offset: int, room: int) -> int:
        """Gather batches in ``work``; returns the offset to go on from."""
        while offset < work.pointer.end_offset and (room > 0 or not work.batches):
            try:
                found = await self._from_block(work, offset, room, first=not work.batches)
            except StratalogError:
                if work.batches:
                    break  # What was read is sound. The next fetch begins where the failure is.
                raise
            if not found.batches:
                break
            work.batches += found.batches
            work.base_offsets += found.base_offsets
            offset, room = found.end_offset, room - sum(map(len, found.batches))
        return offset

    async def offset_for_timestamp(
        self, pointer: ManifestPointer, timestamp_ms: int, from_offset: int = 0
    ) -> FoundRecord | None:
        """The first record at or beyond ``from_offset`` whose timestamp is ``timestamp_ms`` or later (KIP-79), or None.

        Timestamps are not monotonic, so the maximum timestamp of every header is compared, in offset order. Raises
        ``Unavailable`` after ``LOOKUP_TIMEOUT_S``, ``Corrupt``.
        """
        deadline = self._clock.monotonic() + LOOKUP_TIMEOUT_S
        manifest = await self._in_time(self._source.manifest(pointer), deadline)
        start = max(from_offset, manifest.start_offset)
        while True:
            entry = await self._in_time(self._source.segment_reaching(manifest, timestamp_ms, start), deadline)
            if entry is None:
                return None
            found = await self._search_segment(entry, timestamp_ms, start, deadline)
            if found is not None:
                return found
            start = entry.end_offset

    async def timestamp_bound(self, pointer: ManifestPointer) -> int:
        """The maximum timestamp of the whole history, -1 if it is empty. Its record may be below the log's start."""
        manifest = await self._in_time(self._source.manifest(pointer), self._clock.monotonic() + LOOKUP_TIMEOUT_S)
        spans: Sequence[PageRef | SegmentEntry] = (*manifest.pages, *manifest.segments)
        return max((span.max_timestamp_ms for span in spans), default=-1)

    async def leader_epochs(self, pointer: ManifestPointer) -> list[tuple[int, int]]:
        """``(epoch, start offset)`` pairs at the end of cold history, oldest first."""
        last = await self._last_segment(pointer)
        return [(start.epoch, start.start_offset) for start in last[1].leader_epochs] if last else []

    async def producer_snapshot(self, pointer: ManifestPointer) -> tuple[ProducerEntry, ...]:
        """The producers' states at the end of cold history, for a takeover when no hot ledger is left."""
        last = await self._last_segment(pointer)
        if last is None:
            return ()
        return await self._in_time(self._source.producers(last[0]), self._clock.monotonic() + LOOKUP_TIMEOUT_S)

    async def restored_state(self, key: str) -> Checkpoint:
        """A coordinator's state that a restore stored at ``key``. Raises ``NoSuchObject``, ``Corrupt``, ``Unavailable``."""
        place = parse_state_key(key)
        if place is None:
            raise Corrupt(f"{key} is not the key of a coordinator's state")
        content = await self._in_time(self._store.get(key), self._clock.monotonic() + LOOKUP_TIMEOUT_S)
        return decode_state(content, place).checkpoint

    async def aborted_transactions(self, pointer: ManifestPointer, from_offset: int, to_offset: int) -> list[AbortedRange]:
        """Return the aborted transactions that overlap ``[from_offset, to_offset)``, oldest first.

        Each footer has all that overlap its segment, so only the segments of these offsets are looked at. Raises ``NotFound``
        below the start: the segments there are no longer known.
        """
        _require_from_start(pointer, from_offset)
        deadline = self._clock.monotonic() + LOOKUP_TIMEOUT_S
        found: set[AbortedRange] = set()
        offset = from_offset
        while offset < min(to_offset, pointer.end_offset):
            entry, footer = await self._segment(pointer, offset, deadline)
            found |= _aborted_in(footer, from_offset, to_offset)
            offset = entry.end_offset
        return sorted(found, key=_by_first_offset)

    def cached_aborted_transactions(
        self, pointer: ManifestPointer, from_offset: int, to_offset: int
    ) -> list[AbortedRange] | None:
        """Return what ``aborted_transactions`` returns if that takes no read, else None. Raises ``NotFound`` as it does."""
        _require_from_start(pointer, from_offset)
        found: set[AbortedRange] = set()
        offset = from_offset
        while offset < min(to_offset, pointer.end_offset):
            cached = self._source.cached(pointer, offset)
            if cached is None:
                return None
            entry, footer = cached
            found |= _aborted_in(footer, from_offset, to_offset)
            offset = entry.end_offset
        return sorted(found, key=_by_first_offset)

    async def close(self) -> None:
        """Cancel all loads and read-ahead."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._blocks.close()
        await self._lookups.close()

    async def _from_block(self, work: _Fetch, offset: int, room: int, *, first: bool) -> BatchRun:
        """Return the batches of one block from ``offset`` on, up to ``room`` bytes; with ``first``, at least one batch."""
        entry, footer = await self._segment(work.pointer, offset, work.deadline)
        index = find_block(footer.blocks, offset)
        if first and work.stream.ahead_until > offset and not self._blocks.at_hand(block_key(entry, footer.blocks[index])):
            work.missed = True
        self._start_covering(work, entry, footer, index, room)
        block = await self._blocks.get(entry, footer, index, work.deadline)
        found = block.batches_from(offset, room, at_least_one=first)
        if found.end_offset == block.end_offset:
            self._blocks.finish(block_key(entry, footer.blocks[index]))
        return found

    def _start_covering(self, work: _Fetch, entry: SegmentEntry, footer: SegmentFooter, index: int, room: int) -> None:
        """Start to load all blocks of this segment that ``room`` bytes need, so that they load concurrently."""
        covered = footer.blocks[index].plain_length
        while covered < room and index + 1 < len(footer.blocks):
            index += 1
            covered += footer.blocks[index].plain_length
            key = self._blocks.start(entry, footer, index, read_ahead=False)
            if key is not None:
                work.started.append(key)

    async def _segment(self, pointer: ManifestPointer, offset: int, deadline: float) -> Found:
        cached = self._source.cached(pointer, offset)
        if cached is not None:
            return cached
        remaining_s = deadline - self._clock.monotonic()
        return await self._lookups.get(
            (pointer.object_key, pointer.sha256, offset), lambda: self._source.find(pointer, offset), remaining_s
        )

    def _stream_at(self, pointer: ManifestPointer, offset: int) -> _Stream:
        return self._streams.pop((pointer.topic_id, pointer.index, offset)) or _Stream()

    def _continue_stream(self, work: _Fetch, offset: int, next_offset: int) -> None:
        """Remember where the reader continues, and read ahead of it; a reader's first fetch gets no read-ahead."""
        pointer, stream = work.pointer, work.stream
        stream.used_s = self._clock.monotonic()
        if next_offset > offset:
            sequential = stream.window > 0
            wanted = stream.window // 2 if work.missed else stream.window * 2
            window = min(self._settings.read_ahead_blocks, max(1, wanted))
            is_due = work.missed or window != stream.window or next_offset >= stream.refill_at
            stream.window = window
            if sequential and is_due and next_offset < pointer.end_offset:
                self._read_ahead(pointer, next_offset, stream)
        self._streams.put((pointer.topic_id, pointer.index, next_offset), stream)

    def _read_ahead(self, pointer: ManifestPointer, offset: int, stream: _Stream) -> None:
        """Start to load a window of blocks from ``offset`` on, at once as far as manifest and footers are in memory."""
        ends = list[int]()
        room = self._memory_share(stream)
        while len(ends) < stream.window and offset < pointer.end_offset:
            found = self._source.cached(pointer, offset)
            if found is None:
                if len(self._tasks) < _READ_AHEADS_MAX:
                    self._spawn(self._look_up_and_read_ahead(pointer, offset, stream))
                return
            entry, footer = found
            first = stop = find_block(footer.blocks, offset)
            for block in footer.blocks[first : first + stream.window - len(ends)]:
                room -= block.plain_length
                if room < 0:
                    break
                stop, offset = stop + 1, block.last_offset + 1
                ends.append(offset)
            self._blocks.read_ahead(entry, footer, range(first, stop))
            if room < 0:
                break
        if ends:
            stream.ahead_until = max(stream.ahead_until, offset)
            stream.refill_at = ends[(len(ends) - 1) // 2]

    def _memory_share(self, stream: _Stream) -> int:
        """Bytes of memory for the blocks of one of the sequential readers: that which it is in, and those read ahead of it."""
        since_s = self._clock.monotonic() - _SHARES_S
        latest = takewhile(lambda other: other.used_s >= since_s, self._streams.latest_first())
        others = sum(other.window > 0 for other in latest if other is not stream)
        return self._blocks.memory_bytes // (1 + others)

    async def _look_up_and_read_ahead(self, pointer: ManifestPointer, offset: int, stream: _Stream) -> None:
        try:
            await self._segment(pointer, offset, self._clock.monotonic() + LOOKUP_TIMEOUT_S)
        except StratalogError as failure:
            _log.info("read-ahead of %s-%d stopped: %s", pointer.topic_id, pointer.index, failure)
            return
        if self._source.cached(pointer, offset) is not None:  # else there is no memory for it: the next fetch looks it up
            self._read_ahead(pointer, offset, stream)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _search_segment(
        self, entry: SegmentEntry, timestamp_ms: int, from_offset: int, deadline: float
    ) -> FoundRecord | None:
        footer = await self._in_time(self._source.footer(entry), deadline)
        for index, block in enumerate(footer.blocks):
            if block.max_timestamp_ms >= timestamp_ms and block.last_offset >= from_offset:
                content = (await self._blocks.get(entry, footer, index, deadline)).content
                self._blocks.finish(block_key(entry, block))
                for batch, header in iterate_block_batches(content):
                    found = await self._search_batch(batch, header, timestamp_ms, from_offset)
                    if found is not None:
                        return found
        return None

    async def _search_batch(
        self, batch: memoryview, header: BatchHeader, timestamp_ms: int, from_offset: int
    ) -> FoundRecord | None:
        if header.max_timestamp_ms < timestamp_ms or header.last_offset < from_offset:
            return None
        found = await self._searches.first_reaching(batch, header, timestamp_ms, from_offset)
        if found is None:
            return None
        return FoundRecord(offset=found.offset, timestamp_ms=found.timestamp_ms, leader_epoch=header.leader_epoch)

    async def _last_segment(self, pointer: ManifestPointer) -> Found | None:
        if pointer.start_offset == pointer.end_offset:
            return None
        return await self._segment(pointer, pointer.end_offset - 1, self._clock.monotonic() + LOOKUP_TIMEOUT_S)

    async def _in_time(self, read: Awaitable[_Read], deadline: float) -> _Read:
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                return await read
        except TimeoutError as late:
            raise Unavailable(f"{self._store.url} did not answer in time; retry") from late


__all__ = ["LOOKUP_TIMEOUT_S", "ColdReader", "ColdReaderSettings", "FoundRecord"]
