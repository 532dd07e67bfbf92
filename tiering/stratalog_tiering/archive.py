"""A bucket read with no metadata service: which topics it holds, and which manifest of each partition was committed.

Committed is what a marker says was committed. A manifest object without a marker may have lost its race, or its worker may
have died between commit and marker; such a version is passed over, and nothing is lost by that: hot copies
are deleted only after the marker of a version that holds their offsets was written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from stratalog_core.errors import NotFound
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.descriptor import TopicDescriptor, decode_descriptor
from stratalog_tiering.manifest import Manifest, SegmentEntry
from stratalog_tiering.manifest_source import ManifestSource
from stratalog_tiering.object_keys import TOPICS_PREFIX, is_marker, manifests_prefix, parse_topic_key
from stratalog_tiering.publish import pointer_to, read_marker
from stratalog_tiering.segment import SegmentFooter
from stratalog_tiering.store import ObjectStore


class Archive:
    """One bucket (or prefix, or directory) as history."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._source = ManifestSource(store)

    async def topics(self, *, deleted: bool = False) -> list[TopicDescriptor]:
        """Topics by name; with ``deleted`` also those that wait for their objects to be collected."""
        keys = [info.key async for info in self._store.list(TOPICS_PREFIX) if parse_topic_key(info.key) is not None]
        found = [decode_descriptor(await self._store.get(key), TopicDescriptor, key) for key in keys]
        return sorted((t for t in found if deleted or not t.deleted_at_ms), key=lambda t: (t.name, t.topic_id))

    async def topic(self, name: str) -> TopicDescriptor:
        """Raises ``NotFound`` with the names there are."""
        topics = await self.topics()
        for topic in topics:
            if topic.name == name:
                return topic
        raise NotFound(f"{self._store.url} holds no topic {name!r}; it holds {', '.join(t.name for t in topics) or 'none'}")

    async def pointer(self, topic: TopicDescriptor, partition: int) -> ManifestPointer | None:
        """The newest committed manifest of a partition, or None if nothing of it was ever offloaded."""
        async for info in self._store.list(manifests_prefix(topic.topic_id, partition)):
            if is_marker(info.key):
                marker = await read_marker(self._store, info.key)
                digest = bytes.fromhex(marker.sha256)
                manifest = await self._source.manifest_at(marker.manifest_key, digest)
                return pointer_to(manifest, marker.manifest_key, digest)
        return None

    async def manifest(self, pointer: ManifestPointer) -> Manifest:
        return await self._source.manifest(pointer)

    def segments(self, manifest: Manifest) -> AsyncIterator[SegmentEntry]:
        """Live segments in offset order."""
        return self._source.segments(manifest)

    async def footer(self, entry: SegmentEntry) -> SegmentFooter:
        """A segment's footer, proved to be the one that was committed. One ranged GET."""
        return await self._source.read_footer(entry)
