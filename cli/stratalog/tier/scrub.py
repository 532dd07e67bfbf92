"""Behind ``stratalog tier scrub``: checks the partitions of a bucket one after the other, reports and repairs each finding."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from stratalog.output import human_bytes, progress_bar
from stratalog.tier.history import no_topics, verified_row
from stratalog.tier.repair import RepairFrom, repair_row, repair_sources, repair_text
from stratalog.tier.session import store_session
from stratalog_core.errors import NotFound
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.cold.bucket_scrub import BucketScrub, FoundTopic, Inventory
from stratalog_tiering.cold.segment_check import unlimited
from stratalog_tiering.cold.verifier import PartitionReport, Progress
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.repair import Repairer, Repairs
from stratalog_tiering.core.damage import REMEDIES, Finding
from stratalog_tiering.offload.ports import Throttle

MIN_AGE_S: Final = 9 * 24 * 3600
"""Workers delete orphans that are a day old, once a week. With default settings an orphan of this age is unexpected."""
_CHECKSUM_THREADS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of the bucket to check: these topics (none: all), and one partition or all."""

    topics: tuple[str, ...] = ()
    partition: int | None = None
    expects_topics: bool = False
    """Refuse a bucket that has none: its URL may be mistyped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubResult:
    """One row per partition with history, and one per finding."""

    partitions: list[dict[str, object]]
    findings: list[dict[str, Any]]

    @property
    def left(self) -> list[dict[str, Any]]:
        """The findings that were not repaired."""
        return [row for row in self.findings if not row.get("repaired_from")]

    @property
    def document(self) -> dict[str, object]:
        """The result for JSON."""
        return {"partitions": self.partitions, "findings": self.findings}


async def scrub_bucket(
    url: str, part: Part, *, bytes_per_s: int | None, min_age_s: int, repair_from: RepairFrom | None = None
) -> ScrubResult:
    """Check the part of the bucket, and repair it unless ``repair_from`` is None.

    Raises ``NotFound`` for an unknown topic or partition, ``Unavailable``.
    """
    background, clock = ThreadBackground(_CHECKSUM_THREADS, "checksums"), SystemClock()
    try:
        async with store_session(url) as store, AsyncExitStack() as stack:
            with progress_bar() as bar:
                task = bar.add_task("reading the topics", total=None)

                def show(progress: Progress) -> None:
                    text = f"{progress.topic}-{progress.partition}, {human_bytes(progress.bytes)}"
                    bar.update(task, description=f"checking {text}")

                take = Throttle(bytes_per_s, clock).take if bytes_per_s else unlimited
                scrub = BucketScrub(
                    store, background, before_ms=clock.wall_ms() - 1000 * min_age_s, take=take, on_progress=show
                )  # fmt: skip
                repairer: Repairer | None = None
                if repair_from is not None:
                    sources = await stack.enter_async_context(repair_sources(repair_from, store, background))
                    limits = CopyLimits(background=background, clock=clock, take=take)
                    repairer = Repairer(scrub, store, sources, limits)
                inventory = await scrub.inventory()
                partitions = _partitions(inventory, part)
                bar.update(task, total=len(partitions))
                result = ScrubResult(partitions=[], findings=[])
                cluster_ids: set[str] = set()
                for topic, index in partitions:
                    report, repairs = await _checked(scrub, repairer, topic, index)
                    if report.findings or report.progress.manifest_versions:
                        result.partitions.append(verified_row(report))
                    result.findings.extend(_row(found, repairs, topic.name, index) for found in report.findings)
                    cluster_ids |= {report.progress.cluster_id} - {""}
                    bar.advance(task)
            if not part.topics:
                found = [*inventory.findings, *await scrub.owners(frozenset(cluster_ids))]
                repairs = await repairer.bucket(found) if repairer is not None else None
                result.findings.extend(_row(each, repairs) for each in found)
                nothing: Repairs | None = {} if repairer is not None else None
                result.findings.extend([_row(each, nothing) async for each in scrub.strangers(inventory)])
            if part.expects_topics and not (inventory.topics or inventory.deleted or result.findings):
                raise no_topics(store.url)
            return result
    finally:
        background.close()


async def _checked(
    scrub: BucketScrub, repairer: Repairer | None, topic: FoundTopic, index: int
) -> tuple[PartitionReport, Repairs | None]:
    return (await scrub.partition(topic, index), None) if repairer is None else await repairer.partition(topic, index)


def _partitions(inventory: Inventory, part: Part) -> list[tuple[FoundTopic, int]]:
    topics = inventory.selected(part.topics)
    if part.partition is None:
        return [(topic, index) for topic in topics for index in range(topic.partition_count)]
    for topic in topics:
        if part.partition >= topic.partition_count:
            raise NotFound(f"topic {topic.name} has {topic.partition_count} partitions, none with number {part.partition}")
    return [(topic, part.partition) for topic in topics]


def _row(finding: Finding, repairs: Repairs | None, topic: str | None = None, partition: int | None = None) -> dict[str, Any]:
    """Return a finding for JSON; with ``repairs``, also the result of its repair."""
    has_offsets = finding.end_offset > finding.base_offset
    done = repair_row(repairs.get((finding.kind, finding.key))) if repairs is not None else {}
    return {
        "kind": finding.kind.value,
        "topic": topic,
        "partition": partition,
        "key": finding.key,
        "block": finding.block,
        "base_offset": finding.base_offset if has_offsets else None,
        "last_offset": finding.end_offset - 1 if has_offsets else None,
        "detail": finding.problem,
        "remedy": REMEDIES[finding.kind],
        **done,
    }


def finding_text(row: Mapping[str, Any]) -> str:
    """Return a finding as text: problem and place, then the result of the repair, or the remedy if it was not repaired."""
    place = "" if row["topic"] is None else f" of {row['topic']}-{row['partition']}"
    offsets = "" if row["base_offset"] is None else f", offsets {row['base_offset']} to {row['last_offset']}"
    lines = [f"{row['kind']}{place}{offsets}: {row['key']}: {row['detail']}"]
    if "repaired_from" in row:
        lines.append(repair_text(row))
    if not row.get("repaired_from"):
        lines.append(f"remedy: {row['remedy']}")
    return "\n  ".join(lines)
