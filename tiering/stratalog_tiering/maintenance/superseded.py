"""Removes superseded records from cold segments beside running workers, for ``stratalog job compact``.

The job says which offsets are superseded in a history that it has read (:class:`HistoryRead`). Each segment that has some is
written again as a worker's compaction writes one, verified, and committed by compare-and-set of the manifest that it was read
from and of the topic's record, as an erasure is (``erasure.py``). Workers find everything as dirty as it was.

A worker may commit anything in between: it never removes the newest record of a key but a tombstone whose older records it has
removed before, so a record that was superseded stays so (ADR 172). Three things could change that, and end the removal: a fork
that was resolved, or a history that was cut, and has other records at these offsets; an erasure, which may have erased the
newer record; and a topic that is no longer compacted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import UUID

from stratalog_core.errors import Invalid
from stratalog_tiering.cold.lease import HeldLease
from stratalog_tiering.core.compaction_plan import is_young, superseded_until
from stratalog_tiering.core.policy import CompactionPolicy
from stratalog_tiering.core.superseded import OffsetSet, SupersededFilter
from stratalog_tiering.format.manifest import Manifest, Reason, SegmentEntry
from stratalog_tiering.format.manifest_edit import ManifestEdit
from stratalog_tiering.maintenance.compaction import write_compacted
from stratalog_tiering.maintenance.segment_replacements import SegmentKept, commit_replacement, replacements
from stratalog_tiering.offload.beside_workers import CurrentPartition, current_partition, unswept
from stratalog_tiering.offload.commit import previous_version, refuse_fork
from stratalog_tiering.offload.ports import WorkerPorts

_SECRET_BITS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRead:
    """The part of a partition's history in which records are looked for, as it was before it was read."""

    start_offset: int
    end_offset: int
    settled_version: int
    erased_version: int
    segments: tuple[SegmentEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """``entry`` has replaced ``source`` and has ``records`` less. Unreadable batches have superseded records, and stay."""

    source: SegmentEntry
    entry: SegmentEntry
    records: int
    unreadable_batches: int


async def history_to_read(ports: WorkerPorts, topic_id: UUID, partition: int) -> HistoryRead:
    """The part of a partition that may be compacted now.

    Raises ``Invalid`` unless its topic is compacted, ``NotFound``, ``Unavailable``.
    """
    now = await current_partition(ports, topic_id, partition)
    if now.policy.compaction is None or now.state.topic.internal:
        raise Invalid(f"topic {now.state.topic.name!r} is not compacted by tiering: it needs cleanup.policy=compact")
    manifest = (await previous_version(ports, now.state)).manifest
    segments = [entry async for entry in ports.source.segments(manifest)]
    hot_offset = now.state.hot_offset if now.state.pointer is not None else manifest.start_offset
    end = superseded_until(segments, now.policy.compaction, hot_offset, ports.clock.wall_ms())
    end_offset = manifest.start_offset if end is None else end
    return HistoryRead(
        start_offset=manifest.start_offset, end_offset=end_offset, settled_version=manifest.settled_version,
        erased_version=manifest.erased_version, segments=tuple(each for each in segments if each.base_offset < end_offset),
    )  # fmt: skip


async def remove_superseded(
    ports: WorkerPorts, topic_id: UUID, partition: int, read: HistoryRead, superseded: OffsetSet
) -> AsyncIterator[Compacted | SegmentKept]:
    """Remove the records at the offsets ``superseded``, which are below the end of what was ``read``, segment by segment.

    Yields each segment that was replaced, and each that has such records and cannot be. A worker's commit in between makes it
    look again. Raises ``Conflict`` if that happens ``ATTEMPTS_MAX`` times for one segment, and as :func:`compact_segment`.
    """
    is_outdated = False
    async with unswept(ports, topic_id, "the compaction") as lease:

        async def compact(now: CurrentPartition, manifest: Manifest, entry: SegmentEntry) -> Compacted | SegmentKept | None:
            nonlocal is_outdated
            reason = _changed(manifest, now.policy.compaction, read)
            if reason is not None:
                is_outdated = True
                return SegmentKept(entry=entry, reason=reason)
            kept = _reason_to_keep(entry, now, ports.clock.wall_ms())
            return kept or await compact_segment(ports, now, entry, superseded, lease)

        def next_offset(position: int) -> int | None:
            return None if is_outdated else superseded.first_from(max(position, read.start_offset), read.end_offset)

        found: AsyncIterator[Compacted | SegmentKept] = replacements(ports, topic_id, partition, next_offset, compact)
        async for each in found:
            yield each


async def compact_segment(
    ports: WorkerPorts, now: CurrentPartition, source: SegmentEntry, superseded: OffsetSet, lease: HeldLease
) -> Compacted | SegmentKept | None:
    """Replace ``source``, a segment of the committed manifest, by one without superseded records.

    Returns ``SegmentKept`` if none of these can be read, and None if it has none: a worker has removed them since.

    Raises ``Conflict`` if the partition has changed meanwhile, ``Corrupt`` if the segment is damaged or the new one is not what
    it must be, ``LeaseExpired``, ``Unavailable``, ``Forked``; the segment stays in the history then. After ``OutcomeUnknown``
    either may be.
    """
    state = now.state
    previous = await previous_version(ports, state)
    edit = ManifestEdit(previous, writer=ports.settings.worker_id, random_id=ports.random_id)
    await refuse_fork(ports, state)
    last = await ports.source.segment_at(previous.manifest, previous.manifest.end_offset - 1)
    producers = await ports.source.producers(last) if last is not None else ()
    secret = ports.random.getrandbits(_SECRET_BITS).to_bytes(_SECRET_BITS // 8, "big")
    rules = SupersededFilter(superseded, producers, secret)
    entry = await write_compacted(ports, state, [source], rules, _clean_end(source), now.policy)
    if not rules.records_removed:
        await ports.delete_objects([entry.key])
        if not rules.batches_unreadable:
            return None
        count, first = rules.batches_unreadable, rules.first_unreadable
        reason = f"{count} batches with superseded records cannot be read, and stay; {first}"
        return SegmentKept(entry=source, reason=reason)
    await commit_replacement(ports, now, edit, entry, Reason.COMPACTED, lease)
    return Compacted(
        source=source, entry=entry, records=rules.records_removed, unreadable_batches=rules.batches_unreadable
    )  # fmt: skip


def _clean_end(source: SegmentEntry) -> int:
    """Below which each key occurs once, as far as a worker has compacted: the removal makes nothing clean."""
    if source.options.dirty_from is not None:
        return source.options.dirty_from
    return source.end_offset if source.is_compacted else source.base_offset


def _changed(manifest: Manifest, policy: CompactionPolicy | None, read: HistoryRead) -> str | None:
    """Why what was read says nothing about the history any more; None if it does."""
    if policy is None:
        return "the topic is no longer compacted"
    if manifest.settled_version != read.settled_version or manifest.end_offset < read.end_offset:
        return "the history was set back, or a fork of it was resolved, since the job has read it: run the job again"
    if manifest.erased_version != read.erased_version:
        return "records were erased since the job has read the history: run the job again"
    return None


def _reason_to_keep(entry: SegmentEntry, now: CurrentPartition, now_ms: int) -> SegmentKept | None:
    if entry.end_offset > now.state.hot_offset:
        return SegmentKept(entry=entry, reason="it has hot copies")
    if entry.options.lock_until_ms > now_ms:
        return SegmentKept(entry=entry, reason="it is locked", lock_until_ms=entry.options.lock_until_ms)
    if now.policy.compaction is not None and is_young(entry, now.policy.compaction, now_ms):
        return SegmentKept(entry=entry, reason="min.compaction.lag.ms keeps it")
    return None
