"""The report of an erasure: what was found, what was replaced, what is kept and until when. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from stratalog_pipeline.jobs.erase import Search
from stratalog_pipeline.jobs.report import Chart, Report, Table
from stratalog_pipeline.planning import PartitionName
from stratalog_tiering.maintenance.erasure import Erased
from stratalog_tiering.maintenance.segment_replacements import SegmentKept


@dataclass(frozen=True, slots=True, kw_only=True)
class OldObject:
    """An object that was replaced, and has or may have erased records. ``reason`` is that of its replacement.

    It is deleted at ``due_ms`` (wall time), but not while a reader holds ``lease``.
    """

    topic: str
    partition: int
    key: str
    bytes: int
    reason: str
    is_deleted: bool
    due_ms: int
    lease: str = ""


def erasure_report(
    found: Search,
    erased: Sequence[tuple[PartitionName, Erased]],
    refused: Sequence[tuple[PartitionName, SegmentKept]],
    objects: Sequence[OldObject],
    hot: Mapping[PartitionName, int],
    unlisted: Mapping[PartitionName, str],
    changed: Mapping[PartitionName, str],
    *,
    is_dry_run: bool,
) -> Report:
    """Report a search and, unless it is a dry run, its erasures.

    ``hot``: the first offset of each partition that was not searched. ``unlisted``: why replaced objects are not in
    ``objects``. ``changed``: why the history of a partition is not the one that was searched.
    """
    rows = [_partition(name, found, erased, hot) for name in found.histories]
    replaced = [
        {
            **place_of(name), "start_offset": each.entry.base_offset, "end_offset": each.entry.end_offset,
            "records_erased": each.records, "altered_batches": each.altered_batches,
            "identical_batches": each.identical_batches, "unreadable_batches": each.unreadable_batches,
            "old_key": each.source.key, "new_key": each.entry.key,
        }
        for name, each in erased
    ]  # fmt: skip
    kept = [{**asdict(each), "due_at": moment_text(each.due_ms), "lease": each.lease or None} for each in objects]
    refusals = [{**place_of(name), "key": each.entry.key, "reason": reason_text(each)} for name, each in refused]
    unreadable = [
        {
            **place_of(each.name), "start_offset": each.base_offset, "end_offset": each.end_offset,
            "batches": each.unreadable_batches, "first": each.first_unreadable,
        }
        for each in found.unreadable
    ]  # fmt: skip
    other = [{**place_of(name), "reason": reason} for name, reason in changed.items()]
    problems = _problems(found, refused, hot, unlisted, changed)
    totals = {
        "records_found": sum(each.records for each in found.found),
        "segments_found": len(found.found),
        "segments_searched": found.segments,
        "records_erased": sum(each.records for _, each in erased),
        "unreadable_batches": sum(each.unreadable_batches for each in found.unreadable),
    }
    return Report(
        title="Erase",
        document={
            "dry_run": is_dry_run, **totals, "partitions": rows, "segments": replaced, "objects": kept, "refused": refusals,
            "unreadable": unreadable, "changed": other, "problems": problems,
        },
        facts={"verdict": _verdict(problems, is_dry_run=is_dry_run), **totals},
        tables=[
            Table(title="Partitions", columns=tuple(rows[0]) if rows else (), rows=rows),
            Table(title="Segments replaced", columns=tuple(replaced[0]) if replaced else (), rows=replaced),
            Table(title="Unreadable batches", columns=tuple(unreadable[0]) if unreadable else (), rows=unreadable),
            Table(title="Old objects", columns=("key", "bytes", "reason", "is_deleted", "due_at", "lease"), rows=kept),
        ],
        charts=_charts(rows),
        problems=problems,
    )  # fmt: skip


def _problems(
    found: Search,
    refused: Sequence[tuple[PartitionName, SegmentKept]],
    hot: Mapping[PartitionName, int],
    unlisted: Mapping[PartitionName, str],
    changed: Mapping[PartitionName, str],
) -> list[str]:
    """Return everything that the job could not do."""
    problems = [f"{name}: {each.entry.key}: {reason_text(each)}" for name, each in refused]
    problems += [
        f"{name}: offsets from {offset} on are still hot, or were when the search began, and were not searched: offload them,"
        " and erase again"
        for name, offset in hot.items()
    ]
    problems += [
        f"{name}: its replaced objects were neither listed nor deleted: {reason}; erase again"
        for name, reason in unlisted.items()
    ]
    problems += [
        f"{name}: its history is not the one that was searched and may have matching records: {reason}; erase again"
        for name, reason in changed.items()
    ]
    problems += [
        f"{each.name}: {each.unreadable_batches} batches of offsets {each.base_offset}..{each.end_offset - 1} cannot be read:"
        f" they may contain matching records and are not changed; {each.first_unreadable}"
        for each in found.unreadable
    ]
    return problems


def _verdict(problems: Sequence[str], *, is_dry_run: bool) -> str:
    if is_dry_run:
        return f"dry run, {len(problems)} parts not searched" if problems else "dry run"
    return f"{len(problems)} parts left" if problems else "complete"


def _partition(
    name: PartitionName, found: Search, erased: Sequence[tuple[PartitionName, Erased]], hot: Mapping[PartitionName, int]
) -> dict[str, Any]:
    held = found.histories[name].offsets
    return {
        **place_of(name),
        "start_offset": held.first,
        "end_offset": held.end,
        "records_found": sum(each.records for each in found.found if each.name == name),
        "records_erased": sum(each.records for place, each in erased if place == name),
        "hot_from": hot.get(name),
    }


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    labels = [f"{row['topic']}-{row['partition']}" for row in rows if row["records_found"]]
    values = [float(row["records_found"]) for row in rows if row["records_found"]]
    title = "Records found by partition"
    return [Chart(title=title, labels=labels, series={"records": values}, unit="records", is_horizontal=True)] if labels else []


def place_of(name: PartitionName) -> dict[str, Any]:
    return {"topic": name.topic, "partition": name.partition}


def reason_text(refused: SegmentKept) -> str:
    return f"{refused.reason} until {moment_text(refused.lock_until_ms)}" if refused.lock_until_ms else refused.reason


def moment_text(wall_ms: int) -> str:
    try:
        return datetime.fromtimestamp(wall_ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError):
        return f"{wall_ms} ms"
