"""Finds the records of a data-protection request in cold history: the part of ``stratalog job erase`` that runs on Spark.

Every batch is read and searched on the executors. The result says where the records are; the segments are replaced by
``stratalog_tiering.maintenance.erasure``, in the command, with the same rules (``stratalog_tiering.core.erasure``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from pyspark.sql import SparkSession

from stratalog_core.batches.batch import crc_matches
from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Corrupt
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.catalog import load_history, load_segments
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.jobs.session import OnProgress, run_tasks
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import OPEN_BYTES, OffsetRange, PartitionName, grouped
from stratalog_pipeline.scan_plan import wanted_partitions
from stratalog_pipeline.segments import read_blocks
from stratalog_tiering.core.erasure import Selection, selected_or_unreadable
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.segment import iterate_block_batches

PARTITIONS_AT_ONCE = 8


SearchTask: TypeAlias = tuple[tuple[PartitionName, SegmentEntry], ...]
"""The segments that one task reads. Without the selection, which may be large and is the same for all tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRecords:
    """A segment with ``records`` selected records. Offsets: end exclusive.

    Its ``unreadable_batches`` could not be searched; ``first_unreadable`` names the first and the reason.
    """

    name: PartitionName
    base_offset: int
    end_offset: int
    records: int
    stored_bytes: int
    unreadable_batches: int = 0
    first_unreadable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedHistory:
    """The history of a partition that was searched: its newest manifest version in the bucket, 0 if there was none.

    ``settled``: see ``settled_version`` and ``settled_at_ms`` of the manifest. ``sha256``: the manifest's, as in its pointer.
    """

    offsets: OffsetRange
    version: int = 0
    sha256: str = ""
    settled: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """``histories`` are those of each partition that was searched: what was cold when the job began.

    ``unreadable`` are the segments with batches that could not be searched, with selected records or without.
    """

    histories: dict[PartitionName, SearchedHistory]
    segments: int
    found: tuple[FoundRecords, ...]
    unreadable: tuple[FoundRecords, ...] = ()


def search(
    spark: SparkSession, options: ReadOptions, selection: Selection, on_progress: OnProgress = lambda done, total: None
) -> Search:
    """Search the whole cold history of the selected topics. Raises ``Corrupt``, ``NotFound``, ``Unavailable``."""
    with Bucket(options.store) as bucket, reader_lease(bucket, options, "erase"):
        histories, segments = plan_search(bucket, options)
        tasks = search_tasks(segments, options.split_bytes)
        results = run_tasks(spark, options.store, tasks, partial(search_segments, selection), on_progress)
    noted = [each for of_task in results for each in of_task]
    return Search(
        histories=histories,
        segments=len(segments),
        found=tuple(each for each in noted if each.records),
        unreadable=tuple(each for each in noted if each.unreadable_batches),
    )


def plan_search(
    bucket: Bucket, options: ReadOptions
) -> tuple[dict[PartitionName, SearchedHistory], list[tuple[PartitionName, SegmentEntry]]]:
    """Return the cold histories and the segments of the selected partitions, at their newest manifests."""

    async def plan(name: PartitionName) -> tuple[SearchedHistory, list[SegmentEntry]]:
        history = await load_history(bucket, name)
        if history.pointer is None:
            return SearchedHistory(offsets=history.offsets), []
        manifest = await bucket.source.manifest(history.pointer)
        searched = SearchedHistory(
            offsets=history.offsets, version=manifest.version, sha256=history.pointer.sha256,
            settled=(manifest.settled_version, manifest.settled_at_ms),
        )  # fmt: skip
        return searched, await load_segments(bucket, history, history.offsets)

    names = wanted_partitions(bucket, options)
    plans = dict(zip(names, bucket.run(bounded_map(plan, names, PARTITIONS_AT_ONCE)), strict=True))
    histories = {name: searched for name, (searched, _) in plans.items()}
    return histories, [(name, entry) for name, (_, entries) in plans.items() for entry in entries]


def search_tasks(segments: Iterable[tuple[PartitionName, SegmentEntry]], task_bytes: int) -> list[SearchTask]:
    """Return tasks of about ``task_bytes`` stored bytes, or of one larger segment."""
    return grouped((((name, entry), OPEN_BYTES + entry.stored_bytes, 1) for name, entry in segments), task_bytes)


def search_segments(selection: Selection, bucket: Bucket, task: SearchTask) -> list[FoundRecords]:
    """Return the segments of a task with selected records or unreadable batches. Raises ``Corrupt``, ``Unavailable``."""
    searched = [_search_segment(bucket, name, entry, selection) for name, entry in task]
    return [each for each in searched if each.records or each.unreadable_batches]


def _search_segment(bucket: Bucket, name: PartitionName, entry: SegmentEntry, selection: Selection) -> FoundRecords:
    footer, records = bucket.run(bucket.source.footer(entry)), 0
    unreadable_batches, first_unreadable = 0, ""
    for _, plain in read_blocks(bucket, entry, footer, footer.blocks):
        for batch, header in iterate_block_batches(plain):
            if not crc_matches(batch, header):
                raise Corrupt(f"segment {entry.key}: the batch at offset {header.base_offset} does not match its CRC")
            found = selected_or_unreadable(batch, header, selection)
            if isinstance(found, Corrupt):
                unreadable_batches += 1
                first_unreadable = first_unreadable or f"the batch at offset {header.base_offset}: {found.message}"
            else:
                records += found
    return FoundRecords(
        name=name, base_offset=entry.base_offset, end_offset=entry.end_offset, records=records,
        stored_bytes=entry.stored_bytes, unreadable_batches=unreadable_batches, first_unreadable=first_unreadable,
    )  # fmt: skip


def ranges_of(found: Sequence[FoundRecords]) -> dict[PartitionName, list[tuple[int, int]]]:
    """Return the offsets of the segments with selected records, for each partition in order; neighbours are one range."""
    ranges: dict[PartitionName, list[tuple[int, int]]] = {}
    for each in sorted(found, key=lambda one: (str(one.name), one.base_offset)):
        held = ranges.setdefault(each.name, [])
        if held and held[-1][1] == each.base_offset:
            held[-1] = (held[-1][0], each.end_offset)
        else:
            held.append((each.base_offset, each.end_offset))
    return ranges
