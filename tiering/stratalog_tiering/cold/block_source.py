"""Blocks of segments for readers, from memory, local disk or the store: verified, shared between readers, and bounded.

Fetches and read-ahead have separate limits on concurrent reads, so read-ahead never delays a fetch. A block whose bytes do not
match its CRC is never returned: ``Corrupt`` names segment, block and offsets. Memory holds blocks as their batches, the disk as
they are stored, so what is encrypted stays encrypted there: a compressed or encrypted block is written to disk when it is
loaded, any other when memory evicts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from stratalog_core.config import setting
from stratalog_core.errors import Corrupt, NoSuchObject
from stratalog_core.ports import Background, Buffer, Clock, Files
from stratalog_core.single_flight import SingleFlight
from stratalog_core.stepwise import AT_ONCE_BYTES
from stratalog_tiering.cold.block_cache import BlockKey, CachedBlock, DiskCache, LruCache
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.footer import BlockEntry, SegmentFooter
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.segment import plain_block
from stratalog_tiering.metrics import ColdReadMetrics
from stratalog_tiering.store import ObjectStore, StoreWithCopy, read_verified

_MIB: Final = 1024 * 1024
_DISK_WRITES_MAX: Final = 16
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
        self._blocks: LruCache[BlockKey, CachedBlock] = LruCache(memory_bytes, lambda block: block.memory_bytes, self._evicted)
        self._loads: SingleFlight[BlockKey, CachedBlock] = SingleFlight()
        self._fetch_limit = asyncio.Semaphore(settings.fetch_reads)
        self._read_ahead_limit = asyncio.Semaphore(settings.read_ahead_reads)
        self._counted = ColdReadMetrics()
        self._disk_writes: set[asyncio.Task[None]] = set()

    def metrics(self) -> ColdReadMetrics:
        """For a scrape."""
        self._counted.cached_bytes, self._counted.loads_in_progress = self._blocks.weight, len(self._loads)
        self._counted.second_copy_reads = self._store.second_reads if isinstance(self._store, StoreWithCopy) else 0
        return self._counted

    def at_hand(self, key: BlockKey) -> bool:
        """Whether the block is in memory or being loaded."""
        return key in self._blocks or key in self._loads

    async def get(self, entry: SegmentEntry, footer: SegmentFooter, index: int, deadline: float) -> CachedBlock:
        """Block ``index``. Raises ``Corrupt``, or ``Unavailable`` at the deadline; the load continues then, for a retry."""
        key = block_key(entry, footer.blocks[index])
        cached = self._blocks.get(key)
        if cached is not None:
            self._counted.memory_hits += 1
            return cached
        load = self._loader(entry, footer, index, self._fetch_limit)
        return await self._loads.get(key, load, deadline - self._clock.monotonic())

    def start(self, entry: SegmentEntry, footer: SegmentFooter, index: int, *, read_ahead: bool) -> BlockKey | None:
        """Start to load a block, unless it is in memory or being loaded; returns its key if a load was started."""
        key = block_key(entry, footer.blocks[index])
        if self.at_hand(key):
            return None
        limit = self._read_ahead_limit if read_ahead else self._fetch_limit
        self._loads.start(key, self._loader(entry, footer, index, limit), keep=read_ahead)
        return key

    def abandon(self, keys: Iterable[BlockKey]) -> None:
        """Stop loads that no reader waits for or has waited for."""
        for key in keys:
            self._loads.abandon(key)

    async def close(self) -> None:
        await self._loads.close()
        await asyncio.gather(*self._disk_writes, return_exceptions=True)

    def _loader(
        self, entry: SegmentEntry, footer: SegmentFooter, index: int, limit: asyncio.Semaphore
    ) -> Callable[[], Awaitable[CachedBlock]]:
        block = footer.blocks[index]

        async def load() -> CachedBlock:
            key = block_key(entry, block)
            async with limit:
                cipher = await self._unlock(footer) if block.is_encrypted else None
                content = await self._from_disk(key, block, cipher)
                if content is None:
                    content = await self._from_store(entry, index, block, cipher)
            cached = CachedBlock(content, block.base_offset, is_as_stored=block.is_plain)
            self._blocks.put(key, cached)
            return cached

        return load

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

    async def _from_store(self, entry: SegmentEntry, index: int, block: BlockEntry, cipher: BlockCipher | None) -> memoryview:
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
        self._counted.blocks_loaded += 1
        self._counted.loaded_bytes += len(content)
        self._counted.load_seconds.observe(self._clock.monotonic() - began_at_s)
        if not block.is_plain:
            self._write_to_disk(block_key(entry, block), content)
        return plain

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
