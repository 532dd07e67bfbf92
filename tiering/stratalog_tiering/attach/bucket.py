"""Reads a topic of another bucket: its committed history, block by block, each verified as an audit does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from stratalog_core.bounded_map import bounded_map
from stratalog_core.ports import Background, Buffer
from stratalog_tiering.attach.source import PartitionSource, TopicSource, chosen_topic
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.footer import BlockEntry
from stratalog_tiering.format.manifest import Manifest, SegmentEntry
from stratalog_tiering.format.segment import audit_block, iterate_block_batches
from stratalog_tiering.store import ObjectStore

_READS_AT_ONCE: Final = 8
_PARTITIONS_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPartition:
    """One partition's committed history in ``store``."""

    store: ObjectStore
    source: ManifestSource
    manifest: Manifest
    background: Background

    @property
    def base_offset(self) -> int:
        return self.manifest.start_offset

    @property
    def log_start_offset(self) -> int:
        return self.manifest.start_offset

    @property
    def stored_bytes(self) -> int:
        return self.manifest.cold_bytes

    async def batches(self) -> AsyncIterator[Sequence[Buffer]]:
        async for entry in self.source.segments(self.manifest):
            footer = await self.source.read_footer(entry)
            cipher = await self.source.cipher(footer)
            for first in range(0, len(footer.blocks), _READS_AT_ONCE):
                reads = (self._read(entry, block, cipher) for block in footer.blocks[first : first + _READS_AT_ONCE])
                for batches in await asyncio.gather(*reads):
                    yield batches

    async def _read(self, entry: SegmentEntry, block: BlockEntry, cipher: BlockCipher | None) -> list[Buffer]:
        stored = await self.store.get_range(entry.key, entry.data_position + block.position, block.length)
        return await self.background.run(partial(_batches, stored, block, cipher, is_compacted=entry.is_compacted))


def _batches(stored: memoryview, block: BlockEntry, cipher: BlockCipher | None, *, is_compacted: bool) -> list[Buffer]:
    plain = audit_block(stored, block, cipher=cipher, is_compacted=is_compacted)
    return [batch for batch, _ in iterate_block_batches(plain)]


async def stored_topic(store: ObjectStore, wanted: str | None, background: Background) -> TopicSource:
    """The topic ``wanted`` (a name or an id), or the only one. Raises ``Invalid``, ``NotFound``, ``Corrupt``."""
    archive, source = Archive(store), ManifestSource(store, background=background)
    if wanted is None:
        wanted = chosen_topic(store.url, [topic.name for topic in await archive.topics()], None)
    descriptor = await archive.topic(wanted)

    async def manifest(index: int) -> Manifest | None:
        pointer = await archive.pointer(descriptor, index)
        return None if pointer is None else await archive.manifest(pointer)

    manifests = await bounded_map(manifest, range(descriptor.partition_count), _PARTITIONS_AT_ONCE)
    partitions: dict[int, PartitionSource] = {
        index: StoredPartition(store=store, source=source, manifest=found, background=background)
        for index, found in enumerate(manifests)
        if found is not None
    }
    return TopicSource(
        name=descriptor.name, partition_count=descriptor.partition_count, partitions=partitions, configs=descriptor.configs
    )
