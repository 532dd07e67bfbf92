"""Behind ``stratalog job erase``: replaces the segments in which records were found, and accounts for the old objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stratalog.tier.editing import editing_session
from stratalog_core.errors import Invalid
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.protection import is_protected
from stratalog_metadata.records import Topic
from stratalog_pipeline.jobs.report_erasure import OldObject
from stratalog_pipeline.planning import OffsetRange, PartitionName
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.erasure import Selection
from stratalog_tiering.format.manifest import Reason
from stratalog_tiering.maintenance.erasure import Erased, erase_range
from stratalog_tiering.maintenance.segment_replacements import SegmentKept
from stratalog_tiering.offload.beside_workers import current_partition
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.worker.collection import CollectorPorts, delete_due, find_all

WRITER = "job-erase"
"""The writer's name in manifests that an erasure commits."""
Ranges = Mapping[PartitionName, Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EraseFrom:
    """The metadata nodes and the store of the cluster. ``deletes_now``: replaced objects do not wait for ``grace_ms``."""

    addresses: Sequence[str]
    store: str
    grace_ms: int
    deletes_now: bool


@dataclass(slots=True, kw_only=True)
class Erasure:
    """The result. ``hot``: the first offset of each partition that was not searched, because it is or was hot."""

    erased: list[tuple[PartitionName, Erased]] = field(default_factory=list)
    refused: list[tuple[PartitionName, SegmentKept]] = field(default_factory=list)
    objects: list[OldObject] = field(default_factory=list)
    hot: dict[PartitionName, int] = field(default_factory=dict)


async def erase_found(
    origin: EraseFrom,
    searched: Mapping[PartitionName, OffsetRange],
    ranges: Ranges,
    selection: Selection,
    on_segment: Callable[[], None] = lambda: None,
) -> Erasure:
    """Erase the selected records within ``ranges``; ``searched`` are all offsets that were searched.

    Raises ``Invalid``, before any change, if ``store`` is not the bucket of the cluster or a topic is protected against
    deletion. Raises as `erase_range` does, when some segments may be replaced already; the call can be repeated.
    """
    done = Erasure()
    async with editing_session(origin.addresses, origin.store, WRITER) as ports:
        _refuse_protected(ports.metadata.view, [*searched])
        for name, held in ranges.items():
            for offsets in held:
                async for each in erase_range(ports, name.topic_id, name.partition, offsets, selection):
                    if isinstance(each, Erased):
                        done.erased.append((name, each))
                    else:
                        done.refused.append((name, each))
                    on_segment()
        done.hot = await not_searched(ports, searched)
        done.objects = await _old_objects(origin, ports, [*ranges])
    return done


def _refuse_protected(view: MetadataView, names: Sequence[PartitionName]) -> None:
    ids = {name.topic_id for name in names}
    for topic in view.all(Topic):
        if topic.topic_id in ids and is_protected(topic, view):
            raise Invalid(
                f"topic {topic.name!r} is protected against deletion; lift it with"
                f" `stratalog topic config {topic.name} --set stratalog.deletion.protection=false`"
            )


async def not_searched(ports: WorkerPorts, searched: Mapping[PartitionName, OffsetRange]) -> dict[PartitionName, int]:
    """The first offset of each partition of which the bookies may hold records, or which became cold after the search began."""
    found: dict[PartitionName, int] = {}
    for name, offsets in searched.items():
        state = (await current_partition(ports, name.topic_id, name.partition)).state
        firsts = [each.ledger.base_offset for each in state.ledgers if each.ledger.end_offset != each.ledger.base_offset]
        if state.pointer is not None and state.pointer.end_offset > offsets.end:
            firsts.append(offsets.end)
        if firsts:
            found[name] = min(firsts)
    return found


async def _old_objects(origin: EraseFrom, ports: WorkerPorts, names: Sequence[PartitionName]) -> list[OldObject]:
    """Return the objects that erasures replaced and that still exist; with ``deletes_now``, delete those that nothing keeps.

    The rules are those of `stratalog tier gc`: forked history, a reader's lease and a lock keep them.
    """
    ids = {name.topic_id for name in names}
    metadata, store = ports.metadata, ports.store
    topics = [topic for topic in metadata.view.all(Topic) if topic.topic_id in ids]
    collector = CollectorPorts(metadata=metadata, store=store, source=ManifestSource(store), locks=KnownLocks(store))
    judged = await find_all(collector, topics, 0 if origin.deletes_now else origin.grace_ms, ports.clock.wall_ms())
    found = [each for each in judged if each.partition >= 0]
    due = [(each, garbage) for each in found for garbage in each.due if garbage.reason == Reason.ERASED]
    waiting = [(each, garbage) for each in found for garbage in each.waiting if garbage.reason == Reason.ERASED]
    if origin.deletes_now:
        erased = [
            replace(each, due=tuple(garbage for garbage in each.due if garbage.reason == Reason.ERASED)) for each in found
        ]
        await delete_due(metadata, store, erased)
    return [
        OldObject(
            topic=each.topic, partition=each.partition, key=garbage.key, bytes=garbage.object_bytes,
            is_deleted=origin.deletes_now and is_due, due_ms=garbage.due_ms, lease=garbage.lease,
        )
        for is_due, group in ((True, due), (False, waiting))
        for each, garbage in group
    ]  # fmt: skip
