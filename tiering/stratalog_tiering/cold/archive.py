"""Reads a bucket without metadata: its topics, and the committed manifest of each partition.

The newest ``.version`` or ``.committed`` object says which manifest was committed last: the former is that manifest, the
latter a marker that names it. A ``.manifest`` object without a marker is ignored: it may have lost its race, or its worker may
have died between commit and marker. No record is missed by that, because a hot copy is dropped only after one of the two was
written for a version that covers it. Writes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, NotFound
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.deletion_markers import was_undone
from stratalog_tiering.format.commit_marker import decode_marker, decode_topic
from stratalog_tiering.format.descriptor import (
    CommitMarker,
    DeletionMarker,
    Descriptor,
    OwnerDescriptor,
    TopicDescriptor,
    decode_descriptor,
)
from stratalog_tiering.format.manifest import Manifest, SegmentEntry, pointer_to
from stratalog_tiering.format.object_keys import (
    OWNERS_PREFIX,
    TOPICS_PREFIX,
    deletion_marker_key,
    is_marker,
    manifests_prefix,
    marker_key,
    owner_key,
    parse_owner_key,
    parse_topic_key,
    topic_key,
    topic_prefix,
)
from stratalog_tiering.format.segment import SegmentFooter
from stratalog_tiering.store import ObjectStore, read_verified

_READS_AT_ONCE: Final = 64
_Kind = TypeVar("_Kind", bound=Descriptor)


class StoredTopic(NamedTuple):
    """A topic's newest descriptor, and whether the topic is marked as deleted."""

    descriptor: TopicDescriptor
    is_deleted: bool


class ReadTopics(NamedTuple):
    """The topics whose newest descriptor can be read, sorted by name, and by id the error of each other one."""

    readable: list[StoredTopic]
    damaged: dict[UUID, Corrupt]

    def require_all(self) -> None:
        """Raise ``Corrupt`` if the descriptor of a topic is damaged."""
        for error in self.damaged.values():
            raise error


async def stored_topics(store: ObjectStore) -> list[StoredTopic]:
    """All topics of the bucket, sorted by name; objects of a deleted one may be gone. Raises ``Corrupt``, ``Unavailable``."""
    found = await readable_topics(store)
    found.require_all()
    return found.readable


async def readable_topics(store: ObjectStore) -> ReadTopics:
    """Read all topics of the bucket, the deleted ones included. Raises ``Unavailable``.

    An earlier descriptor does not stand in for a damaged one: it may lack partitions.
    """
    keys = {info.key async for info in store.list(TOPICS_PREFIX)}
    parsed = {topic for key in keys if (topic := parse_topic_key(key)) is not None}
    newest = {topic.topic_id: topic.version for topic in sorted(parsed, key=lambda topic: topic.version)}
    damaged: dict[UUID, Corrupt] = {}

    async def read(topic_id: UUID) -> list[StoredTopic]:
        has_marker = deletion_marker_key(topic_id) in keys
        try:
            topic = await read_topic(store, topic_key(topic_id, newest[topic_id]))
        except NoSuchObject:
            if has_marker:
                return []  # A worker has deleted the last of the topic since the listing.
            raise
        except Corrupt as error:
            damaged[topic_id] = error
            return []
        return [StoredTopic(topic, has_marker and await _is_marked(store, topic))]

    found = [topic for topics in await bounded_map(read, newest, _READS_AT_ONCE) for topic in topics]
    readable = sorted(found, key=lambda topic: (topic.descriptor.name, topic.descriptor.topic_id))
    return ReadTopics(readable, damaged)


async def live_topics(store: ObjectStore) -> list[TopicDescriptor]:
    """The bucket's topics that are not deleted, sorted by name.

    A name can occur twice for a while: the topic was created again, and the deletion marker of its predecessor is not written
    yet.
    """
    return [topic.descriptor for topic in await stored_topics(store) if not topic.is_deleted]


async def deleted_topics(store: ObjectStore, topics: ReadTopics) -> list[tuple[TopicDescriptor, DeletionMarker | None]]:
    """Those of the readable topics that are marked as deleted, each with its marker; None if that cannot be read."""

    async def read(topic: TopicDescriptor) -> tuple[TopicDescriptor, DeletionMarker | None]:
        key = deletion_marker_key(topic.topic_id)
        try:
            return topic, await _read_descriptor(store, DeletionMarker, key)
        except (Corrupt, Invalid, NoSuchObject):
            return topic, None

    return await bounded_map(read, [each.descriptor for each in topics.readable if each.is_deleted], _READS_AT_ONCE)


async def is_hidden(store: ObjectStore, topic_id: UUID) -> bool:
    """Whether a deletion marker hides the topic from readers. Raises ``Unavailable``, ``Refused``."""
    try:
        await store.head(deletion_marker_key(topic_id))
    except NoSuchObject:
        return False
    key = await newest_descriptor_key(store, topic_id)
    try:
        return key is None or await _is_marked(store, await read_topic(store, key))
    except (Corrupt, Invalid, NoSuchObject):
        return True


async def _is_marked(store: ObjectStore, topic: TopicDescriptor) -> bool:
    """Whether the topic's deletion marker counts. It does without being read unless the topic was detached."""
    if not topic.detached:
        return True
    key = deletion_marker_key(topic.topic_id)
    try:
        return not was_undone(await _read_descriptor(store, DeletionMarker, key), topic)
    except NoSuchObject:
        return False
    except (Corrupt, Invalid):
        return True


async def read_owner(store: ObjectStore) -> OwnerDescriptor | None:
    """The bucket's present owner; None before the first claim. Raises ``Corrupt``, ``Unavailable``.

    A listing may lag behind the last write, so the owners after the last one listed are looked up by their keys. The objects
    of earlier owners may be lost.
    """
    numbers = [number async for info in store.list(OWNERS_PREFIX) if (number := parse_owner_key(info.key)) is not None]
    number = max(numbers, default=0)
    owner: OwnerDescriptor | None = None
    while True:
        key = owner_key(number)
        try:
            owner = await _read_descriptor(store, OwnerDescriptor, key)
        except NoSuchObject:
            return owner
        number += 1


async def newest_descriptor_key(store: ObjectStore, topic_id: UUID) -> str | None:
    """Key of the newest descriptor of a topic; None if there is none."""
    async for info in store.list(topic_prefix(topic_id)):
        if parse_topic_key(info.key) is not None:
            return info.key
    return None


async def read_topic(store: ObjectStore, key: str) -> TopicDescriptor:
    """The topic descriptor at ``key``. Raises ``NoSuchObject``, ``Corrupt``, also for another topic's, ``Unavailable``."""

    async def read(each: ObjectStore) -> TopicDescriptor:
        return decode_topic(await each.get(key), key)

    return await read_verified(store, read)


async def read_marker(store: ObjectStore, key: str) -> CommitMarker:
    """The commit marker at ``key``, which may be a version object. Raises ``NoSuchObject``, ``Corrupt``, ``Unavailable``."""
    return decode_marker(await store.get(key), key)


async def read_version(store: ObjectStore, source: ManifestSource, key: str) -> tuple[CommitMarker, Manifest]:
    """The commit marker at ``key``, and the manifest with the digest in it. Raises as :func:`read_marker`.

    A marker has no checksum, so only the manifest shows that its digest is altered: both copies of the marker are tried.
    """

    async def read(each: ObjectStore) -> tuple[CommitMarker, Manifest]:
        marker = await read_marker(each, key)
        return marker, await source.manifest_at(marker.manifest_key, bytes.fromhex(marker.sha256))

    return await read_verified(store, read)


async def _read_descriptor(store: ObjectStore, kind: type[_Kind], key: str) -> _Kind:
    async def read(each: ObjectStore) -> _Kind:
        return decode_descriptor(await each.get(key), kind, key)

    return await read_verified(store, read)


def ambiguous_name(name: str, topics: Sequence[TopicDescriptor]) -> str:
    """The error message for a name that several live topics have."""
    ids = " and ".join(str(topic.topic_id) for topic in topics)
    return (
        f"the bucket holds topic {name!r} {len(topics)} times, with the ids {ids}: "
        "it was created again, and the deletion of the earlier one has not reached the bucket yet"
    )


def named_topic(url: str, topics: Sequence[TopicDescriptor], name: str) -> TopicDescriptor:
    """The one of the bucket's topics with this name or id. Raises as :meth:`Archive.topic`."""
    found = [topic for topic in topics if name in (topic.name, str(topic.topic_id))]
    if not found:
        names = ", ".join(topic.name for topic in topics) or "none"
        raise NotFound(f"{url} contains no topic {name!r}; it contains {names}")
    if len(found) > 1:
        raise Invalid(f"{ambiguous_name(name, found)}; give one of the ids instead of the name")
    return found[0]


class Archive:
    """The history in one bucket, prefix or directory."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._source = ManifestSource(store)

    @property
    def url(self) -> str:
        """The store's URL, without credentials."""
        return self._store.url

    async def all_topics(self) -> list[StoredTopic]:
        """All topics, the deleted ones included, sorted by name. Raises ``Corrupt``, ``Unavailable``."""
        return await stored_topics(self._store)

    async def topics(self) -> list[TopicDescriptor]:
        """The topics that are not deleted, sorted by name. Raises ``Corrupt``, ``Unavailable``."""
        return await live_topics(self._store)

    async def topic(self, name: str) -> TopicDescriptor:
        """The topic with this name or id. Raises ``NotFound`` that lists the names, ``Invalid`` if two topics have the name."""
        return named_topic(self._store.url, await self.topics(), name)

    async def pointer(
        self, topic: TopicDescriptor, partition: int, known: ManifestPointer | None = None
    ) -> ManifestPointer | None:
        """The newest committed manifest of a partition; None if nothing of it was ever offloaded. Raises ``Corrupt``.

        If that is still ``known``, one LIST request finds it out.
        """
        async for info in self._store.list(manifests_prefix(topic.topic_id, partition)):
            if is_marker(info.key):
                if known is not None and info.key == marker_key(known.object_key):
                    return known
                marker, manifest = await read_version(self._store, self._source, info.key)
                return pointer_to(manifest, marker.manifest_key, bytes.fromhex(marker.sha256))
        return None

    async def newest_epoch(self, pointer: ManifestPointer) -> int:
        """The leader epoch of the last batch of the history; 0 if it is empty. Raises ``Corrupt``, ``Unavailable``."""
        last = await self._source.segment_at(await self.manifest(pointer), pointer.end_offset - 1)
        return last.leader_epochs[-1].epoch if last is not None and last.leader_epochs else 0

    async def manifest(self, pointer: ManifestPointer) -> Manifest:
        return await self._source.manifest(pointer)

    def segments(self, manifest: Manifest) -> AsyncIterator[SegmentEntry]:
        """Live segments in offset order."""
        return self._source.segments(manifest)

    async def footer(self, entry: SegmentEntry) -> SegmentFooter:
        """A segment's footer, verified against the manifest, by one ranged GET. Raises ``Corrupt``."""
        return await self._source.read_footer(entry)
