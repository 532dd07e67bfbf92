"""``stratalog tier compact``: compacts a topic now."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stratalog.output import human_bytes, json_option, print_done, progress_bar
from stratalog.parameters import Integer
from stratalog.target import metadata_of, metadata_options
from stratalog.tier.offload import Waiting, request_compaction, wait_for_offload
from stratalog.tier.report import PartitionTier, tier_report, topics_named
from stratalog.tier.session import metadata_session
from stratalog.waiting import timeout_option, wait_option
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Topic

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@click.command()
@click.argument("topic")
@click.option("--partition", type=Integer(min=0), help="Only this partition.")
@wait_option("it is compacted", default=True)
@timeout_option(600.0)
@metadata_options
@json_option
def compact(
    topic: str,
    partition: int | None,
    wait: bool,
    timeout_s: float,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Offload everything that TOPIC contains now, and compact it in the object store, whatever its dirty ratio.

    Records that are younger than min.compaction.lag.ms or that are written during the command are not compacted.
    """
    addresses = metadata_of(data, metadata)
    before, after = asyncio.run(_compact(addresses, topic, partition, timeout_s if wait else None))
    if not wait:
        print_done({"topic": topic, "compacted": False}, "requested; see `stratalog tier status`", as_json=as_json)
        return
    rows = [dataclasses.asdict(row) for row in after]
    sizes = [human_bytes(sum(row.cold_bytes for row in part)) for part in (before, after)]
    sentence = f"compacted; {sizes[1]} in the object store, {sizes[0]} before"
    print_done({"topic": topic, "compacted": True, "partitions": rows}, sentence, as_json=as_json)


async def _compact(
    addresses: list[str], name: str, partition: int | None, timeout_s: float | None
) -> tuple[list[PartitionTier], list[PartitionTier]]:
    """The partitions' rows before and after; with a ``timeout_s`` of None they are the same."""
    async with metadata_session(addresses) as client:
        (topic,) = topics_named(client.view, [name])
        partitions = range(topic.partition_count) if partition is None else [partition]
        before = _rows(client.view, topic, partition)
        await request_compaction(client, topic, partitions)
        click.echo(f"requested {topic.name}: {len(partitions)} partitions", err=True)
        if timeout_s is None:
            return before, before
        with progress_bar() as progress:
            task = progress.add_task(f"compacting {topic.name}", total=topic.partition_count)
            show = partial(_show_done, client.view, topic, progress, task)
            await wait_for_offload(client, topic, Waiting(timeout_s=timeout_s, on_progress=show))
        return before, _rows(client.view, topic, partition)


def _rows(view: MetadataView, topic: Topic, partition: int | None) -> list[PartitionTier]:
    return [row for row in tier_report(view, [topic]) if partition in (None, row.partition)]


def _show_done(view: MetadataView, topic: Topic, progress: Progress, task: TaskID, done: int) -> None:
    """Show the partitions that are done, and how far those in progress are, each as its share of a partition."""
    running = [row for row in tier_report(view, [topic]) if row.compacting == "rewrite"]
    shares = (row.compacting_offset / max(1, row.compacting_end) for row in running)
    progress.update(task, completed=min(topic.partition_count, done + sum(shares)))
