"""Finds each partition's committed history: from the metadata quorum if its addresses are given, else from the bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from stratalog.tier.report import topics_named
from stratalog.tier.session import metadata_session
from stratalog_core.errors import NotFound
from stratalog_metadata.records import ManifestPointer, manifest_pointer_key
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.verifier import PartitionReport
from stratalog_tiering.core.damage import Finding
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdPartition:
    """A partition with history in the store."""

    topic: str
    pointer: ManifestPointer


async def cold_partitions(store: ObjectStore, addresses: Sequence[str], topics: Sequence[str]) -> list[ColdPartition]:
    """Return the cold partitions of ``topics`` (none: all). Reads only the bucket if ``addresses`` is empty.

    Raises ``NotFound``.
    """
    return await (_by_metadata(addresses, topics) if addresses else _by_bucket(Archive(store), topics))


async def _by_metadata(addresses: Sequence[str], names: Sequence[str]) -> list[ColdPartition]:
    async with metadata_session(addresses) as client:
        return [
            ColdPartition(topic=topic.name, pointer=pointer)
            for topic in topics_named(client.view, names)
            for index in range(topic.partition_count)
            if (pointer := client.view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, index))) is not None
        ]


async def topics_in(archive: Archive) -> list[TopicDescriptor]:
    """Return the topics that are not deleted. Raises ``NotFound`` if the bucket never had one."""
    found = await archive.topics()
    if not found and not await archive.all_topics():
        raise no_topics(archive.url)
    return found


def no_topics(url: str) -> NotFound:
    """The error of a bucket without topics."""
    return NotFound(f"{url} contains no topics: check bucket and prefix; nothing was offloaded to them")


async def _by_bucket(archive: Archive, names: Sequence[str]) -> list[ColdPartition]:
    topics = [await archive.topic(name) for name in names] if names else await topics_in(archive)
    return [
        ColdPartition(topic=topic.name, pointer=pointer)
        for topic in topics
        for index in range(topic.partition_count)
        if (pointer := await archive.pointer(topic, index)) is not None
    ]


async def segment_rows(store: ObjectStore, partitions: Sequence[ColdPartition]) -> AsyncIterator[dict[str, object]]:
    """Yield one row per live segment, in offset order within each partition."""
    archive = Archive(store)
    for partition in partitions:
        manifest = await archive.manifest(partition.pointer)
        async for segment in archive.segments(manifest):
            yield _segment_row(partition, segment)


def _segment_row(partition: ColdPartition, segment: SegmentEntry) -> dict[str, object]:
    return {
        "topic": partition.topic,
        "partition": partition.pointer.index,
        "key": segment.key,
        "base_offset": segment.base_offset,
        "last_offset": segment.end_offset - 1,
        "record_count": segment.record_count,
        "bytes": segment.stored_bytes,
        "created_at_ms": segment.created_at_ms,
        "storage_class": segment.options.storage_class,
        "lock_mode": segment.options.lock_mode,
        "lock_until_ms": segment.options.lock_until_ms,
        "version_id": segment.options.version_id,
        "sha256": segment.object_sha256.hex(),
    }


def verified_row(report: PartitionReport) -> dict[str, object]:
    """Return a row about the verified part of one partition."""
    progress = report.progress
    return {
        "topic": progress.topic,
        "partition": progress.partition,
        "start_offset": progress.start_offset,
        "end_offset": progress.end_offset,
        "segments": progress.segments,
        "records": progress.records,
        "bytes": progress.bytes,
        "batches": progress.tree_size,
        "tree_head": progress.tree_head,
        "findings": len(report.findings),
    }


def finding_row(report: PartitionReport, finding: Finding) -> dict[str, object]:
    """Return a row with a finding and its place: segment (or manifest), block, offsets."""
    return {
        "topic": report.progress.topic,
        "partition": report.progress.partition,
        "kind": finding.kind.value,
        "segment": finding.key,
        "block": finding.block,
        "base_offset": finding.base_offset,
        "last_offset": finding.end_offset - 1,
        "problem": finding.problem,
    }


def damage_text(row: Mapping[str, object]) -> str:
    """Return a row of `finding_row` as a line. Findings that are not in a block, or about no records, have no such place."""
    places = [] if row["block"] is None else [f"block {row['block']}"]
    if int(str(row["last_offset"])) >= int(str(row["base_offset"])):
        places.append(f"offsets {row['base_offset']} to {row['last_offset']}")
    return ": ".join([f"DAMAGED {row['segment']}", *([", ".join(places)] if places else []), str(row["problem"])])
