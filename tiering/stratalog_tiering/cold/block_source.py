"""Blocks of segments for readers, from memory, local disk or the store: verified, shared between readers, and bounded.

Fetches and read-ahead have separate limits on concurrent reads, so read-ahead never delays a fetch. Read-ahead gets adjacent
blocks with one GET. A block whose bytes do not match its CRC is never returned: ``Corrupt`` names segment, block and offsets.
Memory holds blocks as their batches, the disk as they are stored, so what is encrypted stays encrypted there: a compressed or
encrypted block is written to disk when it is loaded, any other when memory evicts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from stratalog_core.config import setting
from stratalog_core.errors import Corrupt, NoSuchObject, StratalogError
from stratalog_core.ports import Background, Buffer, Clock, Files
from stratalog_core.single_flight import SingleFlight
from stratalog_core.stepwise import AT_ONCE_BYTES
from stratalog_tiering.cold.block_cache import BlockKey, BlockMemory, CachedBlock, DiskCache
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.footer import BlockEntry, SegmentFooter
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.segment import plain_block
from stratalog_tiering.metrics import ColdReadMetrics
from stratalog_tiering.store import ObjectStore, StoreWithCopy, get_pieces, read_verified

_MIB: Final = 1024 * 1024
_DISK_WRITES_MAX: Final = 16
RUN_BLOCKS_MAX: Final = 4
_RUN_BYTES_MAX: Final = 5 * _MIB
"""Adjacent blocks that read-ahead gets with one GET, and their plain size. One GET of four blocks of 1 MiB takes half of the
CPU time that MinIO needs for a GET each, and two thirds of that of obstore."""
_RunContent = tuple[list[memoryview], float]
"""The stored bytes of each block of a run, and when their read began (monotonic seconds)."""
Unlock = Callable[[SegmentFooter], Awaitable[BlockCipher | None]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdReaderSettings:
    """Limits of one process's cold reads."""

    disk_bytes: int = setting(0, help="Size of the block cache on local disk, behind the one in memory; 0: none", minimum=0)
    read_ahead_blocks: int = setting(
        8, help="Maximum number of blocks read ahead of one sequential reader; 0: none", minimum=0, maximum=64
    )
    fetch_reads: int = setting(8, help="Maximum number of concurrent reads for fetches", minimum=1, maximum=64)
    read_ahead_reads: int = setting(4, help="Maximum number of concurrent reads for read-ahead", minimum=1, maximum=64)


def block_key(entry: SegmentEntry, block: BlockEntry) -> BlockKey:
    """The key of a block in the caches."""
    return entry.key, entry.data_position + block.position


class BlockSource:
    """One per process. ``files`` (emptied at the start) is needed for the disk cache only.

    ``unlock`` returns the cipher of a segment's blocks. ``background`` is needed for the disk cache, and decrypts and
    decompresses large blocks.
    """

    def __init__(
        self,
        store: ObjectStore,
        unlock: Unlock,
        settings: ColdReaderSettings,
        clock: Clock,
        memory_bytes: int,
        files: Files | None = None,
        background: Background | None = None,
    ) -> None:
        self._store = store
        self._unlock = unlock
        self._clock = clock
        self._background = background
        self._disk: DiskCache | None = None
        if files is not None and background is not None and settings.disk_bytes:
            self._disk = DiskCache(files, background, settings.disk_bytes)
        self._memory = BlockMemory(memory_bytes, clock, self._evicted)
        self._loads: SingleFlight[BlockKey, CachedBlock] = SingleFlight()
        self._fetch_limit = asyncio.Semaphore(settings.fetch_reads)
        self._read_ahead_limit = asyncio.Semaphore(settings.read_ahead_reads)
        self._counted = ColdReadMetrics()
        self._disk_writes: set[asyncio.Task[None]] = set()
        self._run_reads: set[asyncio.Task[None]] = set()

    def metrics(self) -> ColdReadMetrics:
        """For a scrape."""
        self._counted.cached_bytes, self._counted.loads_in_progress = self._memory.bytes_held, len(self._loads)
        self._counted.second_copy_reads = self._store.second_reads if isinstance(self._store, StoreWithCopy) else 0
        return self._counted

    @property
    def memory_bytes(self) -> int:
        """How much memory there is for blocks."""
        return self._memory.bytes_max

    def at_hand(self, key: BlockKey) -> bool:
        """Whether the block is in memory or being loaded."""
        return key in self._memory or key in self._loads

    async def get(self, entry: SegmentEntry, footer: SegmentFooter, index: int, deadline: float) -> CachedBlock:
        """Block ``index``. Raises ``Corrupt``, or ``Unavailable`` at the deadline; the load continues then, for a retry."""
        key = block_key(entry, footer.blocks[index])
        cached = self._memory.get(key)
        if cached is not None:
            self._counted.memory_hits += 1
            return cached
        load = self._loader(entry, footer, index, self._fetch_limit)
        return await self._loads.get(key, load, deadline - self._clock.monotonic())

    def finish(self, key: BlockKey) -> None:
        """A reader has read the block to its end."""
        self._memory.finish(key)

    def start(self, entry: SegmentEntry, footer: SegmentFooter, index: int, *, read_ahead: bool) -> BlockKey | None:
        """Start to load a block, unless it is in memory or being loaded; returns its key if a load was started."""
        key = block_key(entry, footer.blocks[index])
        if self.at_hand(key):
            return None
        limit = self._read_ahead_limit if read_ahead else self._fetch_limit
        self._loads.start(key, self._loader(entry, footer, index, limit), keep=read_ahead)
        return key

    def read_ahead(self, entry: SegmentEntry, footer: SegmentFooter, indexes: range) -> None:
        """Start to load those blocks of a segment that are neither in memory nor being loaded, adjacent ones with one GET."""
        for run in self._runs(entry, footer.blocks, indexes):
            if len(run) == 1:
                self.start(entry, footer, run.start, read_ahead=True)
            else:
                self._start_run(entry, footer, run)

    def _runs(self, entry: SegmentEntry, blocks: Sequence[BlockEntry], indexes: range) -> list[range]:
        """Runs of the blocks that are to be loaded, each as large as one read may be."""
        runs: list[range] = []
        for index in indexes:
            if self.at_hand(block_key(entry, blocks[index])):
                continue
            if runs and self._may_join(entry, blocks, runs[-1], index):
                runs[-1] = range(runs[-1].start, index + 1)
            else:
                runs.append(range(index, index + 1))
        return runs

    def _may_join(self, entry: SegmentEntry, blocks: Sequence[BlockEntry], run: range, index: int) -> bool:
        """Whether one read may return block ``index`` together with ``run``: a block on the local disk is not read again."""
        if run.stop != index or len(run) == RUN_BLOCKS_MAX or blocks[index - 1].end_position != blocks[index].position:
            return False
        if self._disk is not None and any(block_key(entry, block) in self._disk for block in blocks[index - 1 : index + 1]):
            return False
        return sum(block.plain_length for block in blocks[run.start : index + 1]) <= _RUN_BYTES_MAX

    def _start_run(self, entry: SegmentEntry, footer: SegmentFooter, run: range) -> None:
        content: asyncio.Future[_RunContent] = asyncio.get_running_loop().create_future()
        loads = [
            self._loads.start(
                block_key(entry, footer.blocks[index]), self._run_loader(entry, footer, run, index, content), keep=True
            )
            for index in run
        ]
        reading = asyncio.ensure_future(self._read_run(entry, footer.blocks[run.start : run.stop], content, loads))
        self._run_reads.add(reading)
        reading.add_done_callback(self._run_reads.discard)

    async def _read_run(
        self,
        entry: SegmentEntry,
        blocks: Sequence[BlockEntry],
        content: asyncio.Future[_RunContent],
        loads: Sequence[asyncio.Task[CachedBlock]],
    ) -> None:
        """Read the run's bytes. The limit counts it until its blocks are loaded, because its bytes are in memory until then."""
        start, lengths = entry.data_position + blocks[0].position, [block.length for block in blocks]
        try:
            async with self._read_ahead_limit:
                began_at_s = self._clock.monotonic()
                try:
                    content.set_result((await get_pieces(self._store, entry.key, start, lengths), began_at_s))
                except StratalogError as failure:
                    content.set_exception(failure)
                await asyncio.wait(loads)
        finally:
            if not content.cancel():
                content.exception()  # Mark it as retrieved: all loads may have been cancelled.

    def _run_loader(
        self, entry: SegmentEntry, footer: SegmentFooter, run: range, index: int, content: asyncio.Future[_RunContent]
    ) -> Callable[[], Awaitable[CachedBlock]]:
        block = footer.blocks[index]
        alone = self._loader(entry, footer, index, nullcontext())

        async def load() -> CachedBlock:
            try:
                pieces, began_at_s = await asyncio.shield(content)
                stored = pieces[index - run.start]
                cipher = await self._unlock(footer) if block.is_encrypted else None
                plain = await self._plain(stored, block, cipher)
            except (Corrupt, NoSuchObject):
                return await alone()  # Another block may be the damaged one. Its own read names this one, or uses another copy.
            return self._loaded(entry, block, stored, plain, began_at_s)

        return load

    def abandon(self, keys: Iterable[BlockKey]) -> None:
        """Stop loads that no reader waits for or has waited for."""
        for key in keys:
            self._loads.abandon(key)

    async def close(self) -> None:
        reading = list(self._run_reads)
        for task in reading:
            task.cancel()
        await self._loads.close()
        await asyncio.gather(*reading, return_exceptions=True)
        await asyncio.gather(*self._disk_writes, return_exceptions=True)

    def _loader(
        self, entry: SegmentEntry, footer: SegmentFooter, index: int, limit: AbstractAsyncContextManager[None]
    ) -> Callable[[], Awaitable[CachedBlock]]:
        block = footer.blocks[index]

        async def load() -> CachedBlock:
            async with limit:
                cipher = await self._unlock(footer) if block.is_encrypted else None
                content = await self._from_disk(block_key(entry, block), block, cipher)
                if content is None:
                    return await self._from_store(entry, index, block, cipher)
            return self._cached(entry, block, content)

        return load

    def _cached(self, entry: SegmentEntry, block: BlockEntry, content: memoryview) -> CachedBlock:
        cached = CachedBlock(content, block.base_offset, is_as_stored=block.is_plain)
        self._memory.put(block_key(entry, block), cached)
        return cached

    def _loaded(
        self, entry: SegmentEntry, block: BlockEntry, stored: memoryview, plain: memoryview, began_at_s: float
    ) -> CachedBlock:
        """Keep a block that was read from the store."""
        self._counted.blocks_loaded += 1
        self._counted.loaded_bytes += len(stored)
        self._counted.load_seconds.observe(self._clock.monotonic() - began_at_s)
        if not block.is_plain:
            self._write_to_disk(block_key(entry, block), stored)
        return self._cached(entry, block, plain)

    async def _from_disk(self, key: BlockKey, block: BlockEntry, cipher: BlockCipher | None) -> memoryview | None:
        content = await self._disk.read(key) if self._disk is not None else None
        if content is None or self._disk is None:
            return None
        try:
            plain = await self._plain(content, block, cipher)
        except Corrupt as bad:
            _log.warning("a block in the disk cache is damaged and is read again: %s", bad)
            self._disk.discard(key)
            return None
        self._counted.disk_hits += 1
        return plain

    async def _from_store(self, entry: SegmentEntry, index: int, block: BlockEntry, cipher: BlockCipher | None) -> CachedBlock:
        began_at_s = self._clock.monotonic()

        async def read(store: ObjectStore) -> tuple[memoryview, memoryview]:
            try:
                stored = await store.get_range(entry.key, entry.data_position + block.position, block.length)
            except NoSuchObject as gone:
                raise Corrupt(gone.message) from gone
            return stored, await self._plain(stored, block, cipher)

        try:
            content, plain = await read_verified(self._store, read)
        except Corrupt as bad:
            self._counted.unreadable_blocks += 1
            raise Corrupt(
                f"segment {entry.key}, block {index} (offsets {block.base_offset}..{block.last_offset}): {bad.message}",
                key=entry.key,
                block=index,
                base_offset=block.base_offset,
                last_offset=block.last_offset,
            ) from bad
        return self._loaded(entry, block, content, plain, began_at_s)

    async def _plain(self, stored: Buffer, block: BlockEntry, cipher: BlockCipher | None) -> memoryview:
        """The block's batches. Raises ``Corrupt``. The limit on reads under way also bounds the memory of decompression."""
        if self._background is None or block.is_plain or block.plain_length <= AT_ONCE_BYTES:
            return plain_block(stored, block, cipher)
        return await self._background.run(lambda: plain_block(stored, block, cipher))

    def _evicted(self, key: BlockKey, block: CachedBlock) -> None:
        if block.is_as_stored:
            self._write_to_disk(key, block.content)

    def _write_to_disk(self, key: BlockKey, stored: memoryview) -> None:
        # Bounded: a slow disk costs cache hits, not memory.
        if self._disk is not None and len(self._disk_writes) < _DISK_WRITES_MAX:
            task = asyncio.ensure_future(self._disk.write(key, stored))
            self._disk_writes.add(task)
            task.add_done_callback(self._disk_writes.discard)
