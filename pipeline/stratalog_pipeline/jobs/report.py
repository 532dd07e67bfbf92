"""Reports of jobs: one value from which the JSON document, the table on the terminal and the HTML page are made. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from stratalog_pipeline.jobs.audit import PartitionAudit
from stratalog_pipeline.jobs.export import ExportResult
from stratalog_pipeline.jobs.replay import ReplayResult
from stratalog_pipeline.jobs.usage import DEPTHS, Usage

if TYPE_CHECKING:
    from stratalog_pipeline.jobs.iceberg import Published

Row: TypeAlias = Mapping[str, Any]
_DEPTH_OF: Final = {"codecs": 1, "producers": 1, "keys": 2, "key_counts": 2}
"""The index of the depth from which on a list of a usage report is filled."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A bar chart: for each series a value for each label. ``is_horizontal`` suits long labels."""

    title: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    unit: Literal["records", "bytes"]
    is_horizontal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under the names in ``columns``. A column whose name ends in ``bytes`` holds sizes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``document`` is the JSON; ``facts`` are the few figures to see first; ``problems`` is empty if all is well."""

    title: str
    document: Row
    facts: Mapping[str, str | int]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    problems: Sequence[str] = ()


def audit_report(audits: Sequence[PartitionAudit]) -> Report:
    """Report an audit: totals, problems, and the digest of each partition."""
    partitions = [{**asdict(one), "records_by_day": _days(one.records_by_day)} for one in audits]
    problems = [f"{one.topic}-{one.partition}: {problem}" for one in audits for problem in one.problems]
    totals = {
        name: sum(getattr(one, name) for one in audits)
        for name in ("segments", "batches", "records", "stored_bytes", "late_records", "repeated_records")
    }
    columns = (
        "topic", "partition", "start_offset", "end_offset", "segments", "records", "stored_bytes", "late_records",
        "repeated_records", "digest", "problems",
    )  # fmt: skip
    rows = [{**row, "problems": len(row["problems"])} for row in partitions]
    return Report(
        title="Audit",
        document={"sound": not problems, "totals": totals, "problems": problems, "partitions": partitions},
        facts={"verdict": "sound" if not problems else f"{len(problems)} problems", "partitions": len(audits), **totals},
        tables=[Table(title="Partitions", columns=columns, rows=rows)],
        charts=[
            _stacked("Records by day", [(one.topic, _days(one.records_by_day)) for one in audits], "records"),
            _stacked("Bytes by compression", [(one.topic, one.bytes_by_codec) for one in audits], "bytes"),
        ],
        problems=problems,
    )


def usage_report(found: Usage) -> Report:
    """Report usage: partitions first, then what the depth provides."""
    depth = DEPTHS.index(found.depth)
    # Of other depths nothing is known, which is not the same as an empty list.
    document = {name: rows for name, rows in asdict(found).items() if depth >= _DEPTH_OF.get(name, 0)}
    tables = [
        Table(title=title, columns=tuple(rows[0]), rows=rows)
        for title, rows in (
            ("Partitions", found.partitions), ("Days", found.days), ("Compression", found.codecs),
            ("Largest producers", found.producers), ("Keys", found.key_counts), ("Heaviest keys", found.keys),
        )
        if rows
    ]  # fmt: skip
    charts = [
        _stacked("Bytes by day", [(row["topic"], {row["day"] or "none": row["bytes"]}) for row in found.days], "bytes"),
        _stacked("Bytes by compression", [(row["topic"], {row["compression"]: row["bytes"]}) for row in found.codecs], "bytes"),
        _horizontal("Heaviest keys", [(f"{row['topic']} {_shown(row['key'])}", row["records"]) for row in found.keys]),
    ]
    return Report(
        title="Usage",
        document=document,
        facts={
            "partitions": len(found.partitions),
            "records": sum(row["records"] for row in found.partitions),
            "stored_bytes": sum(row["stored_bytes"] for row in found.partitions),
            "batch_bytes": sum(row["batch_bytes"] for row in found.partitions),
        },
        tables=tables,
        charts=[chart for chart in charts if chart.labels],
    )


def export_report(result: ExportResult, target: str, published: Published | None = None) -> Report:
    """Report an export: the files of this run and their totals by partition; and what was published in a table of Iceberg."""
    partitions: dict[tuple[str, int], dict[str, Any]] = {}
    for file in result.files:
        place = file.topic, file.partition
        row = partitions.setdefault(
            place, {"topic": file.topic, "partition": file.partition, "start_offset": file.first, "end_offset": file.end,
                    "records": 0, "files": 0, "size_bytes": 0},
        )  # fmt: skip
        row["end_offset"] = max(row["end_offset"], file.end)
        row["records"] += file.records
        row["files"] += 1
        row["size_bytes"] += file.size_bytes
    totals = {"records": result.records, "files": len(result.files), "size_bytes": result.size_bytes}
    files = [{name: getattr(file, name) for name in file.__struct_fields__} for file in result.files]
    return Report(
        title="Export",
        document={
            "target": target, "run": result.run, "was_resumed": result.was_resumed, **totals, "files": files,
            **({} if published is None else {"iceberg": asdict(published)}),
        },
        facts={
            "run": result.run, "resumed": "yes" if result.was_resumed else "no", **totals,
            **({} if published is None else {"table": published.table, "records in the table": published.table_records}),
        },
        tables=[
            Table(title="Partitions", columns=tuple(next(iter(partitions.values()), ())), rows=list(partitions.values())),
            Table(title="Files", columns=("key", "records", "size_bytes", "sha256"), rows=files),
        ],
        charts=[_horizontal("Records by partition", [(f"{t}-{p}", row["records"]) for (t, p), row in partitions.items()])],
        problems=_differences(published),
    )  # fmt: skip


def _differences(published: Published | None) -> list[str]:
    if published is None or published.table_records == published.exported_records:
        return []
    return [
        f"table {published.table} has {published.table_records} records, and {published.exported_records} were exported to it:"
        " others write to it or delete from it"
    ]


def replay_report(result: ReplayResult, target: str) -> Report:
    """Report a replay: what was sent, the range of each partition, and what was left out of it."""
    rows = [
        {"topic": topic, "partition": int(number), "start_offset": first, "end_offset": result.end[topic][number]}
        for topic, partitions in result.start.items()
        for number, first in partitions.items()
    ]
    totals = {
        "records": result.records, "offsets": result.offsets, "windows": result.windows,
        "offsets_left_out": sum(gap.end_offset - gap.start_offset for gap in result.gaps),
    }  # fmt: skip
    gaps = [msgspec.structs.asdict(gap) for gap in result.gaps]
    columns = ("topic", "partition", "start_offset", "end_offset")
    return Report(
        title="Replay",
        document={"target": target, "was_resumed": result.was_resumed, **totals, "partitions": rows, "gaps": gaps},
        facts={"target": target, "resumed": "yes" if result.was_resumed else "no", **totals},
        tables=[
            Table(title="Partitions", columns=columns, rows=rows),
            Table(title="Left out: removed by retention", columns=columns, rows=gaps),
        ],
    )


def _days(by_day: Mapping[int, int]) -> dict[str, int]:
    """Return counts by ISO date from counts by days since 1970. Records without a timestamp, or before 1970: ``none``."""
    days: dict[str, int] = {}
    for day, count in by_day.items():
        name = "none" if day < 0 else _date(day)
        days[name] = days.get(name, 0) + count
    return days


def _date(day: int) -> str:
    try:
        return (_EPOCH + timedelta(days=day)).date().isoformat()
    except OverflowError:
        return f"day {day}"


def _stacked(title: str, counted: Sequence[tuple[str, Mapping[str, int]]], unit: Literal["records", "bytes"]) -> Chart:
    """Sum counts by topic and label; the labels in order."""
    labels = sorted({label for _, counts in counted for label in counts})
    series: dict[str, list[float]] = {}
    for topic, counts in counted:
        values = series.setdefault(topic, [0.0] * len(labels))
        for place, label in enumerate(labels):
            values[place] += counts.get(label, 0)
    return Chart(title=title, labels=labels, series=series, unit=unit)


def _horizontal(title: str, counted: Sequence[tuple[str, int]]) -> Chart:
    labels, values = [label for label, _ in counted], [float(value) for _, value in counted]
    return Chart(title=title, labels=labels, series={"records": values}, unit="records", is_horizontal=True)


def _shown(key: str | None) -> str:
    return "(no key)" if key is None else key
