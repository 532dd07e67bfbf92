"""Behind ``stratalog job compact``: which history may be compacted, and the removal of the records that were found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stratalog.tier.editing import editing_session
from stratalog_core.errors import NoSuchObject, NotFound, Unavailable
from stratalog_metadata.records import Topic
from stratalog_pipeline.planning import PartitionName
from stratalog_tiering.core.superseded import OffsetSet
from stratalog_tiering.format.object_keys import is_version_object, marker_key
from stratalog_tiering.maintenance.segment_replacements import SegmentKept
from stratalog_tiering.maintenance.superseded import Compacted, HistoryRead, history_to_read, remove_superseded
from stratalog_tiering.offload.beside_workers import current_partition
from stratalog_tiering.offload.ports import WorkerPorts

WRITER = "job-compact"
"""The writer's name in manifests that the job commits."""


@dataclass(slots=True, kw_only=True)
class Removal:
    """The result, in the order of the commits."""

    compacted: list[tuple[PartitionName, Compacted]] = field(default_factory=list)
    refused: list[tuple[PartitionName, SegmentKept]] = field(default_factory=list)


async def histories_to_read(addresses: Sequence[str], store: str, topics: Sequence[str]) -> dict[PartitionName, HistoryRead]:
    """The part of each partition of ``topics`` that may be compacted. Readers of the bucket find this history, or a later one.

    Raises ``Invalid`` if ``store`` is not the bucket of the cluster or a topic is not compacted, ``NotFound``, and
    ``Unavailable``, also if a version is committed and not in the bucket yet.
    """
    async with editing_session(addresses, store, WRITER) as ports:
        await ports.metadata.refresh()
        known = {topic.name: topic for topic in ports.metadata.view.all(Topic)}
        found: dict[PartitionName, HistoryRead] = {}
        for name in topics:
            if name not in known:
                raise NotFound(f"the cluster has no topic {name!r}")
            topic = known[name]
            for partition in range(topic.partition_count):
                place = PartitionName(topic=name, topic_id=topic.topic_id, partition=partition)
                found[place] = await history_to_read(ports, topic.topic_id, partition)
                await _require_in_store(ports, place)
        return found


async def _require_in_store(ports: WorkerPorts, name: PartitionName) -> None:
    """Raise ``Unavailable`` if the newest version is in metadata alone.

    Spark would read an older one from the bucket. If the newer one is an erasure, that has records which supersede others and
    are erased.
    """
    pointer = (await current_partition(ports, name.topic_id, name.partition)).state.pointer
    if pointer is None:
        return
    key = pointer.object_key
    try:
        await ports.store.head(key if is_version_object(key) else marker_key(key))
    except NoSuchObject:
        raise Unavailable(
            f"manifest version {pointer.manifest_version} of {name} is committed and not in the bucket yet: a tiering worker"
            " stores it in its next step; run the job again"
        ) from None


async def remove_found(
    addresses: Sequence[str],
    store: str,
    read: Mapping[PartitionName, HistoryRead],
    superseded: Mapping[PartitionName, OffsetSet],
    on_segment: Callable[[], None] = lambda: None,
) -> Removal:
    """Remove the superseded records. Raises as `remove_superseded`, when some segments may be replaced already; it can be
    called again."""
    done = Removal()
    async with editing_session(addresses, store, WRITER) as ports:
        for name, history in read.items():
            async for each in remove_superseded(ports, name.topic_id, name.partition, history, superseded[name]):
                if isinstance(each, Compacted):
                    done.compacted.append((name, each))
                else:
                    done.refused.append((name, each))
                on_segment()
    return done
