"""Behind ``stratalog job erase``: replaces the segments in which records were found, and accounts for the old objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

from stratalog.tier.editing import editing_session
from stratalog_core.errors import Conflict, Invalid, NotFound
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.protection import is_protected
from stratalog_metadata.records import Topic
from stratalog_pipeline.jobs.erase import SearchedHistory
from stratalog_pipeline.jobs.report_erasure import OldObject
from stratalog_pipeline.options import Wanted
from stratalog_pipeline.planning import OffsetRange, PartitionName, is_wanted
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.erasure import Selection
from stratalog_tiering.core.forks import Forked
from stratalog_tiering.format.manifest import Reason
from stratalog_tiering.maintenance.erasure import Erased, erase_range
from stratalog_tiering.maintenance.segment_replacements import SegmentKept
from stratalog_tiering.offload.beside_workers import current_partition
from stratalog_tiering.offload.commit import ATTEMPTS_MAX, previous_version, refuse_fork
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.worker.collection import CollectorPorts, Found, delete_due, find_all

WRITER = "job-erase"
"""The writer's name in manifests that an erasure commits."""
REPLACED = frozenset({Reason.ERASED, Reason.MERGED, Reason.COMPACTED, Reason.REPAIRED})
"""Why an object was removed although its records stay in the history: an erasure changes only the segment that has them now."""
NOTHING = SearchedHistory(offsets=OffsetRange(first=0, end=0))
Searched = Mapping[PartitionName, SearchedHistory]
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
    """The result. ``hot``: the first offset of each partition that was not searched, because it is or was hot.

    ``unlisted``: why the replaced objects of a partition are neither in ``objects`` nor deleted. ``changed``: why the history
    of a partition is not the one that was searched.
    """

    erased: list[tuple[PartitionName, Erased]] = field(default_factory=list)
    refused: list[tuple[PartitionName, SegmentKept]] = field(default_factory=list)
    objects: list[OldObject] = field(default_factory=list)
    hot: dict[PartitionName, int] = field(default_factory=dict)
    unlisted: dict[PartitionName, str] = field(default_factory=dict)
    changed: dict[PartitionName, str] = field(default_factory=dict)


async def erase_found(
    origin: EraseFrom,
    wanted: Wanted,
    searched: Searched,
    ranges: Ranges,
    selection: Selection,
    on_segment: Callable[[], None] = lambda: None,
) -> Erasure:
    """Erase the selected records within ``ranges``; ``searched`` are all histories that were searched in ``wanted`` topics.

    Nothing more is erased from a partition once its history is found not to be the one that was searched.
    Raises, before any change, ``Invalid`` if ``store`` is not the bucket of the cluster or a topic is protected against
    deletion, and ``NotFound`` if the cluster does not have a topic. Raises as `erase_range` does, when some segments may be
    replaced already; the call can be repeated.
    """
    done = Erasure()
    async with editing_session(origin.addresses, origin.store, WRITER) as ports:
        _refuse_unknown(ports.metadata.view, [*searched])
        _refuse_protected(ports.metadata.view, [*searched])
        for name, held in ranges.items():
            for offsets in held:
                if await changed_since(ports, name, searched[name]) is not None:
                    break
                async for each in erase_range(ports, name.topic_id, name.partition, offsets, selection):
                    if isinstance(each, Erased):
                        done.erased.append((name, each))
                    else:
                        done.refused.append((name, each))
                    on_segment()
        done.hot = await not_searched(ports, wanted, searched)
        # After that: history that was set back may have become cold again up to the same offset.
        done.changed = await changed_histories(ports, searched)
        done.objects, refused = await old_objects(origin, ports, [*searched])
        # Nothing was promised about partitions without an erasure.
        done.unlisted = {name: reason for name, reason in refused.items() if origin.deletes_now or name in ranges}
    return done


def _refuse_unknown(view: MetadataView, names: Sequence[PartitionName]) -> None:
    known = {topic.topic_id for topic in view.all(Topic)}
    for name in names:
        if name.topic_id not in known:
            raise NotFound(
                f"topic {name.topic!r} with the id {name.topic_id} is in the bucket and not in the cluster: it was detached, or"
                " is being deleted; erase from the others"
            )


def _refuse_protected(view: MetadataView, names: Sequence[PartitionName]) -> None:
    ids = {name.topic_id for name in names}
    for topic in view.all(Topic):
        if topic.topic_id in ids and is_protected(topic, view):
            raise Invalid(
                f"topic {topic.name!r} is protected against deletion; lift it with"
                f" `stratalog topic config {topic.name} --set stratalog.deletion.protection=false`"
            )


async def not_searched(ports: WorkerPorts, wanted: Wanted, searched: Searched) -> dict[PartitionName, int]:
    """The first offset of each partition of which the bookies may hold records, or which became cold after the search began.

    Also of the ``wanted`` topics, and of partitions of the searched ones, that the bucket did not have yet.
    """
    await ports.metadata.refresh()
    ids, names = {name.topic_id for name in searched}, {name.topic for name in searched}
    found: dict[PartitionName, int] = {}
    for topic in ports.metadata.view.all(Topic):
        if topic.topic_id not in ids and (topic.name in names or not is_wanted(wanted, topic.name)):
            continue
        for index in range(topic.partition_count):
            name = PartitionName(topic=topic.name, topic_id=topic.topic_id, partition=index)
            try:
                first = await _not_searched(ports, name, searched.get(name, NOTHING))
            except NotFound:
                if _is_present(ports.metadata.view, topic.topic_id):
                    raise
                break  # The topic was deleted meanwhile.
            if first is not None:
                found[name] = first
    return found


async def _not_searched(ports: WorkerPorts, name: PartitionName, searched: SearchedHistory) -> int | None:
    state = (await current_partition(ports, name.topic_id, name.partition)).state
    firsts = [each.ledger.base_offset for each in state.ledgers if each.ledger.end_offset != each.ledger.base_offset]
    end = searched.offsets.end
    if state.pointer is not None and state.pointer.end_offset > end:
        firsts.append(max(end, state.pointer.start_offset))
    return min(firsts, default=None)


def _is_present(view: MetadataView, topic_id: UUID) -> bool:
    return any(topic.topic_id == topic_id for topic in view.all(Topic))


async def changed_histories(ports: WorkerPorts, searched: Searched) -> dict[PartitionName, str]:
    """Why the history of a partition is not the one that was searched, of each of which it is not."""
    found: dict[PartitionName, str] = {}
    for name, history in searched.items():
        try:
            reason = await changed_since(ports, name, history)
        except NotFound:
            if _is_present(ports.metadata.view, name.topic_id):
                raise
            continue  # The topic was deleted meanwhile.
        if reason is not None:
            found[name] = reason
    return found


async def changed_since(ports: WorkerPorts, name: PartitionName, searched: SearchedHistory) -> str | None:
    """Why the history of a partition does not continue the one that was searched; None if it does.

    Workers' commits continue it. Searched was the newest version in the bucket: of a forked history, it may be the line that
    metadata does not know, and if the decision on a fork is not in the bucket yet, the line that is no longer kept.
    """
    if not searched.version:
        return None  # Whatever the partition has now was not searched, and `not_searched` names it.
    for attempt in range(1, ATTEMPTS_MAX + 1):
        state = (await current_partition(ports, name.topic_id, name.partition)).state
        try:
            await refuse_fork(ports, state)
            manifest = (await previous_version(ports, state)).manifest
            break
        except Forked as forked:
            return forked.message
        except Conflict:
            if attempt == ATTEMPTS_MAX:
                raise
    if (manifest.settled_version, manifest.settled_at_ms) != searched.settled:
        return "a fork of it was resolved, or it was restored up to a point"
    pointer = state.pointer
    version = pointer.manifest_version if pointer is not None else 0
    if version < searched.version or (
        version == searched.version and pointer is not None and pointer.sha256 != searched.sha256
    ):
        return f"metadata has another manifest version {version} than the bucket had, whose newest was {searched.version}"
    return None


async def old_objects(
    origin: EraseFrom, ports: WorkerPorts, names: Sequence[PartitionName]
) -> tuple[list[OldObject], dict[PartitionName, str]]:
    """Return the replaced objects of partitions with erasures, and why those of other partitions cannot be told.

    With ``deletes_now``, delete what nothing keeps, by the rules of `stratalog tier gc`: forked history, a reader's lease and a
    lock keep objects. Erasures of earlier runs count, too: they may have been interrupted. An object that a merge or
    a compaction replaced before an erasure has the erased records as well.
    """
    ids = {name.topic_id for name in names}
    metadata, store = ports.metadata, ports.store
    topics = [topic for topic in metadata.view.all(Topic) if topic.topic_id in ids]
    collector = CollectorPorts(metadata=metadata, store=store, source=ManifestSource(store), locks=KnownLocks(store))
    judged = await find_all(collector, topics, 0 if origin.deletes_now else origin.grace_ms, ports.clock.wall_ms())
    of_topic = {topic.name: topic.topic_id for topic in topics}
    of_partitions = [each for each in judged if each.partition >= 0]
    refused = {
        PartitionName(topic=each.topic, topic_id=of_topic[each.topic], partition=each.partition): each.refused
        for each in of_partitions
        if each.refused
    }
    found = [each for each in of_partitions if _has_erasures(each)]
    due = [(each, garbage) for each in found for garbage in each.due if garbage.reason in REPLACED]
    waiting = [(each, garbage) for each in found for garbage in each.waiting if garbage.reason in REPLACED]
    if origin.deletes_now:
        replaced = [replace(each, due=tuple(garbage for garbage in each.due if garbage.reason in REPLACED)) for each in found]
        await delete_due(metadata, store, replaced)
    objects = [
        OldObject(
            topic=each.topic, partition=each.partition, key=garbage.key, bytes=garbage.object_bytes, reason=garbage.reason,
            is_deleted=origin.deletes_now and is_due, due_ms=garbage.due_ms, lease=garbage.lease,
        )
        for is_due, group in ((True, due), (False, waiting))
        for each, garbage in group
    ]  # fmt: skip
    return objects, refused


def _has_erasures(found: Found) -> bool:
    return any(garbage.reason == Reason.ERASED for garbage in (*found.due, *found.waiting))
