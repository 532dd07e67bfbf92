"""The report of a compaction by ``stratalog job compact``: what is superseded, what was removed, and what was left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stratalog_pipeline.jobs.report import Chart, Report, Table
from stratalog_pipeline.jobs.report_erasure import moment_text, place_of, reason_text
from stratalog_pipeline.planning import PartitionName
from stratalog_tiering.core.superseded import OffsetSet
from stratalog_tiering.maintenance.segment_replacements import SegmentKept
from stratalog_tiering.maintenance.superseded import Compacted, HistoryRead

_SEGMENT_COLUMNS = ("topic", "partition", "start_offset", "end_offset", "records", "superseded", "stored_bytes", "locked_until")
_REPLACED_COLUMNS = (
    "topic", "partition", "start_offset", "end_offset", "records_removed", "unreadable_batches", "old_bytes", "new_bytes",
    "old_key", "new_key",
)  # fmt: skip


def compaction_report(
    read: Mapping[PartitionName, HistoryRead],
    superseded: Mapping[PartitionName, OffsetSet],
    compacted: Sequence[tuple[PartitionName, Compacted]],
    refused: Sequence[tuple[PartitionName, SegmentKept]],
    *,
    now_ms: int,
    is_dry_run: bool,
) -> Report:
    """Report what was found in the histories that were read and, unless it is a dry run, what became of it."""
    segments = [
        {
            **place_of(name), "start_offset": each.base_offset, "end_offset": each.end_offset, "records": each.record_count,
            "superseded": count, "stored_bytes": each.stored_bytes,
            "locked_until": moment_text(each.options.lock_until_ms) if each.options.lock_until_ms > now_ms else None,
        }
        for name, history in read.items()
        for each in history.segments
        if (count := superseded[name].count(each.base_offset, min(each.end_offset, history.end_offset)))
    ]  # fmt: skip
    replaced = [
        {
            **place_of(name), "start_offset": each.entry.base_offset, "end_offset": each.entry.end_offset,
            "records_removed": each.records, "unreadable_batches": each.unreadable_batches,
            "old_bytes": each.source.stored_bytes, "new_bytes": each.entry.stored_bytes,
            "old_key": each.source.key, "new_key": each.entry.key,
        }
        for name, each in compacted
    ]  # fmt: skip
    partitions = [_partition(name, history, segments, replaced) for name, history in read.items()]
    left = [{**place_of(name), "key": each.entry.key, "reason": reason_text(each)} for name, each in refused]
    problems = [f"{name}: {each.entry.key}: {reason_text(each)}" for name, each in refused]
    problems += [
        f"{name}: {each.entry.key}: {each.unreadable_batches} batches with superseded records cannot be read, and stay"
        for name, each in compacted
        if each.unreadable_batches
    ]
    totals = {
        "records_superseded": sum(row["superseded"] for row in segments),
        "segments_found": len(segments),
        "segments_read": sum(len(history.segments) for history in read.values()),
        "records_removed": sum(each.records for _, each in compacted),
        "stored_bytes_before": sum(each.source.stored_bytes for _, each in compacted),
        "stored_bytes_after": sum(each.entry.stored_bytes for _, each in compacted),
    }
    return Report(
        title="Compact",
        document={
            "dry_run": is_dry_run, **totals, "partitions": partitions, "segments": segments, "replaced": replaced,
            "refused": left, "problems": problems,
        },
        facts={"verdict": _verdict(problems, is_dry_run=is_dry_run), **totals},
        tables=[
            Table(title="Partitions", columns=tuple(partitions[0]) if partitions else (), rows=partitions),
            Table(title="Segments with superseded records", columns=_SEGMENT_COLUMNS, rows=segments),
            Table(title="Segments replaced", columns=_REPLACED_COLUMNS, rows=replaced),
        ],
        charts=_charts(partitions),
        problems=problems,
    )  # fmt: skip


def _verdict(problems: Sequence[str], *, is_dry_run: bool) -> str:
    if is_dry_run:
        return "dry run"
    return f"{len(problems)} parts left" if problems else "complete"


def _partition(
    name: PartitionName, history: HistoryRead, segments: Sequence[Mapping[str, Any]], replaced: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    place = place_of(name)

    def total(rows: Sequence[Mapping[str, Any]], column: str) -> int:
        return sum(row[column] for row in rows if place.items() <= row.items())

    return {
        **place,
        "start_offset": history.start_offset,
        "end_offset": history.end_offset,
        "superseded": total(segments, "superseded"),
        "records_removed": total(replaced, "records_removed"),
        "stored_bytes": total(segments, "stored_bytes"),
    }


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    found = [row for row in rows if row["superseded"]]
    labels = [f"{row['topic']}-{row['partition']}" for row in found]
    values = [float(row["superseded"]) for row in found]
    title = "Superseded records by partition"
    return [Chart(title=title, labels=labels, series={"records": values}, unit="records", is_horizontal=True)] if labels else []
