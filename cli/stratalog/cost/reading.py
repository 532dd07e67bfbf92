"""Reads what topics store: listings and manifests from the store, hot copies from metadata if it is given. Writes nothing.

A listing of a topic costs one request for each thousand objects, and each partition two reads: its newest commit marker and its
manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final
from uuid import UUID

from stratalog.cost.usage import Activity, PartitionObjects, TopicUsage, add_descriptors, add_partition
from stratalog.tier.history import topics_in
from stratalog.tier.report import topics_named
from stratalog.tier.session import metadata_session, store_session
from stratalog_core.bounded_map import bounded_map
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Ledger, LedgerState
from stratalog_tiering.cold.archive import Archive, read_marker
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.format.manifest import RemovedObject, SegmentEntry
from stratalog_tiering.format.object_keys import (
    marker_key,
    newest_committed,
    object_owner,
    parse_segment_key,
    topic_prefix,
    topic_prefixes,
)
from stratalog_tiering.store import ObjectInfo, ObjectStore

_PARTITIONS_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedTopic:
    """A topic to count. ``hot_bytes`` is None if metadata is not known."""

    name: str
    topic_id: UUID
    partitions: int
    hot_bytes: int | None = None


async def read_usage(
    addresses: Sequence[str], store_url: str, names: Sequence[str], *, window_s: float, now_ms: int
) -> list[TopicUsage]:
    """The usage of the topics ``names`` (none: all); hot copies only if there are ``addresses`` of metadata nodes.

    Raises ``NotFound``, ``Corrupt``, ``Unavailable``.
    """
    async with store_session(store_url) as store:
        topics = await (_by_metadata(addresses, names) if addresses else _by_bucket(Archive(store), names))
        return [await topic_usage(store, topic, window_s=window_s, now_ms=now_ms) for topic in topics]


async def _by_metadata(addresses: Sequence[str], names: Sequence[str]) -> list[PricedTopic]:
    async with metadata_session(addresses) as client:
        hot = hot_copies(client.view)
        return [
            PricedTopic(
                name=topic.name, topic_id=topic.topic_id, partitions=topic.partition_count, hot_bytes=hot.get(topic.topic_id, 0)
            )
            for topic in topics_named(client.view, names)
        ]


async def _by_bucket(archive: Archive, names: Sequence[str]) -> list[PricedTopic]:
    topics = [await archive.topic(name) for name in names] if names else await topics_in(archive)
    return [PricedTopic(name=topic.name, topic_id=topic.topic_id, partitions=topic.partition_count) for topic in topics]


def hot_copies(view: MetadataView) -> dict[UUID, int]:
    """Bytes on bookies by topic id: the payload of each sealed ledger, once for each copy."""
    found: dict[UUID, int] = {}
    for ledger in view.all(Ledger):
        if ledger.state is LedgerState.CLOSED:
            found[ledger.topic_id] = found.get(ledger.topic_id, 0) + ledger.payload_bytes * ledger.write_quorum
    return found


async def topic_usage(store: ObjectStore, topic: PricedTopic, *, window_s: float, now_ms: int) -> TopicUsage:
    """The usage of one topic at the wall time ``now_ms``, with its activity since the topic exists or in ``window_s``."""
    segments_prefix, *prefixes = topic_prefixes(topic.topic_id)
    descriptors = [info async for info in store.list(topic_prefix(topic.topic_id))]
    others: dict[int, list[ObjectInfo]] = {}
    for prefix in prefixes:
        async for info in store.list(prefix):
            others.setdefault(_partition(info), []).append(info)
    segments = list[ObjectInfo]()
    async for info in store.list(segments_prefix):
        # A wrapped data key has the prefix of its segment, but the bucket's default storage class.
        (segments if parse_segment_key(info.key) else others.setdefault(_partition(info), [])).append(info)
    listed = [*descriptors, *segments, *(info for group in others.values() for info in group)]
    age_s = (now_ms - min((info.last_modified_ms for info in listed), default=0)) / 1000
    usage = TopicUsage(
        topic=topic.name, partitions=topic.partitions, hot_bytes=topic.hot_bytes,
        activity=Activity(seconds=max(1.0, min(window_s, age_s))),
    )  # fmt: skip
    source = ManifestSource(store)
    groups = [(partition, tuple(group)) for partition, group in groupby(segments, _partition)]
    idle = [(partition, ()) for partition in others.keys() - {partition for partition, _ in groups}]

    async def add(group: tuple[int, tuple[ObjectInfo, ...]]) -> None:
        partition, infos = group
        add_partition(usage, await _objects(store, source, infos, tuple(others.get(partition, ()))), now_ms)

    await bounded_map(add, [*groups, *idle], _PARTITIONS_AT_ONCE)
    add_descriptors(usage, descriptors, now_ms)
    return usage


def _partition(info: ObjectInfo) -> int:
    _, partition = object_owner(info.key) or (None, -1)
    return partition


async def _objects(
    store: ObjectStore, source: ManifestSource, segments: tuple[ObjectInfo, ...], others: tuple[ObjectInfo, ...]
) -> PartitionObjects:
    key = newest_committed(info.key for info in others)
    live: dict[str, SegmentEntry] = {}
    removed: list[RemovedObject] = []
    if key is not None:
        marker = await read_marker(store, marker_key(key))
        manifest = await source.manifest_at(key, bytes.fromhex(marker.sha256))
        live = {entry.key: entry async for entry in source.segments(manifest)}
        removed = [each async for each in source.removed(manifest)]
    return PartitionObjects(segments=segments, others=others, live=live, removed=removed)
