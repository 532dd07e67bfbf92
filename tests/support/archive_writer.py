"""Writes history into a bucket that no cluster owns, for benchmarks, tests and tools that make archives.

There is one writer and no metadata quorum, so the commit marker, or the version object, is the commit. A cluster's own history
is written by the tiering worker only.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.ports import Buffer, Clock, Random
from stratalog_metadata.records import ManifestPointer, Topic
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.format.footer import AbortedTransaction
from stratalog_tiering.format.manifest import SegmentEntry, empty_manifest, pointer_to, segment_entry
from stratalog_tiering.format.manifest_edit import ManifestEdit, NewManifest, Previous
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_keys import segment_key, version_key
from stratalog_tiering.format.segment import BLOCK_BYTES_TARGET, SegmentIdentity, SegmentWriter
from stratalog_tiering.offload.commit import store_manifest
from stratalog_tiering.offload.commit_markers import mark_committed
from stratalog_tiering.offload.data_keys import new_encryption
from stratalog_tiering.offload.topic_descriptors import describe_topic
from stratalog_tiering.store import ObjectStore


class ArchiveWriter:
    """Appends segments to the partitions of one topic."""

    def __init__(
        self,
        store: ObjectStore,
        topic: Topic,
        clock: Clock,
        random: Random,
        *,
        block_bytes_target: int = BLOCK_BYTES_TARGET,
        limits: ManifestLimits | None = None,
        zstd_level: int | None = None,
        version_objects: bool = False,
        encryption_key: str = "",
    ) -> None:
        """``version_objects``: manifests have the form that workers give them, and no markers.

        ``encryption_key``: segments are encrypted by data keys which this key of the store's ring protects.
        """
        self._store = store
        self._topic = topic
        self._clock = clock
        self._random = random
        self._block_bytes_target = block_bytes_target
        self._limits = limits
        self._zstd_level = zstd_level
        self._version_objects = version_objects
        self._encryption_key = encryption_key
        self._source = ManifestSource(store)
        self._previous: dict[int, Previous] = {}

    @property
    def topic_id(self) -> UUID:
        return self._topic.topic_id

    async def append(
        self,
        partition: int,
        batches: Sequence[Buffer],
        *,
        base_offset: int | None = None,
        producers: Sequence[ProducerEntry] = (),
        aborted_transactions: Sequence[AbortedTransaction] = (),
    ) -> tuple[ManifestPointer, SegmentEntry]:
        """Write ``batches`` as one segment and commit it. ``base_offset`` is used for a partition's first segment only.

        Raises ``Corrupt`` if the batches do not continue the partition's offsets, and the store's errors.
        """
        if not self._previous:
            await describe_topic(self._store, self._topic)
        previous = self._previous.get(partition) or self._first(partition, base_offset or 0)
        entry, leaves = await self._write_segment(previous, batches, producers, aborted_transactions)
        edit = ManifestEdit(previous, writer="archive-writer", random_id=self._random_id, limits=self._limits)
        entry = edit.append(entry, leaves)
        edit.move_to_pages(await self._source.pages(edit.pages_to_merge()))
        lists = await self._source.removed_lists(edit.lists_to_merge())
        tree_pages = await self._source.tree_pages(edit.tree_pages_to_merge())
        new = edit.finish(created_at_ms=self._clock.wall_ms(), lists=lists, tree_pages=tree_pages)
        pointer = await self._commit(new)
        self._previous[partition] = Previous(manifest=new.manifest, key=pointer.object_key, sha256=new.sha256)
        return pointer, entry

    async def _commit(self, new: NewManifest) -> ManifestPointer:
        if not self._version_objects:
            pointer = await store_manifest(self._store, self._source, new)
            await mark_committed(self._store, pointer, self._clock.wall_ms())
            return pointer
        key = version_key(new.manifest.topic_id, new.manifest.partition, new.manifest.version)
        for part_key, content in (*new.parts, (key, new.content)):
            await self._store.put(part_key, [content])
        return pointer_to(new.manifest, key, new.sha256)

    def _first(self, partition: int, base_offset: int) -> Previous:
        return Previous(manifest=empty_manifest(self._topic.topic_id, self._topic.name, partition, base_offset))

    def _random_id(self) -> int:
        return self._random.getrandbits(64)

    async def _write_segment(
        self,
        previous: Previous,
        batches: Sequence[Buffer],
        producers: Sequence[ProducerEntry],
        aborted: Sequence[AbortedTransaction],
    ) -> tuple[SegmentEntry, bytes]:
        manifest = previous.manifest
        identity = SegmentIdentity(
            cluster_id="c", topic_id=manifest.topic_id, topic_name=manifest.topic_name, partition=manifest.partition,
            base_offset=manifest.end_offset, ledger_ids=(),
        )  # fmt: skip
        epoch = read_header(batches[-1]).leader_epoch
        key = segment_key(manifest.topic_id, manifest.partition, manifest.end_offset, epoch, self._random_id())
        encryption = await new_encryption(
            self._store, manifest.topic_id, manifest.partition, key, self._encryption_key
        )  # fmt: skip
        writer = SegmentWriter(identity, self._block_bytes_target, self._zstd_level, encryption)
        for batch in batches:
            writer.append(batch)
        written = writer.finish(created_at_ms=self._clock.wall_ms(), producers=producers, aborted_transactions=aborted)
        await self._store.put(key, writer.take_parts())
        return segment_entry(key, written), written.leaves
