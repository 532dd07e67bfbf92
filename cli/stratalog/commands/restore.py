"""``stratalog restore``: brings a cluster's topics back from its bucket after everything else is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import click

from stratalog.deletion import confirm, yes_option
from stratalog.local.state import refuse_cluster
from stratalog.moments import format_moment
from stratalog.output import human_bytes, json_option, print_json, print_rows, progress_bar
from stratalog.parameters import TIMES, Integer, moment_ms
from stratalog.restored_groups import GroupsReport, bucket_topics, ends_in_rows, planned_groups, restore_groups
from stratalog.target import existing_store, metadata_of, name_values
from stratalog.tier.session import metadata_session, reader_lease, store_session
from stratalog_core.errors import Corrupt, Invalid, NotFound, Unavailable
from stratalog_core.natural_numbers import natural_number
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import REPLICATION_FACTOR_MAX
from stratalog_tiering.cold.archive import ReadTopics, deleted_topics, read_owner, readable_topics
from stratalog_tiering.core.restoring import TopicHistory
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.format.object_keys import deletion_marker_key
from stratalog_tiering.maintenance.cutting import CutPoint, CutPorts
from stratalog_tiering.maintenance.restoring import (
    Points,
    RestoredTopics,
    is_known,
    planned_cuts,
    read_history,
    restore_topics,
    topics_to_restore,
)
from stratalog_tiering.offload.ownership import cluster_id_in
from stratalog_tiering.store import ObjectStore

_COLUMNS: Final = ("topic", "partition", "start_offset", "end_offset", "records", "bytes", "state")
_THREADS: Final = 2
_FOUND_S: Final = 30.0
_RETRY_S: Final = 0.1
_SHOWN_MAX: Final = 5
Row = dict[str, Any]


@click.command("restore")
@click.option(
    "--store", "url", envvar="STRATALOG_STORE", required=True, help="The bucket: a directory or a URL (s3://, az://, gs://)."
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Restore into this directory, for `stratalog up --data DIR --store URL`.",
)
@click.option(
    "--metadata", help="Restore into the cluster of these metadata nodes (HOST:PORT,…), before its brokers and workers start."
)
@click.option("--topic", "topics", multiple=True, help="Only this topic, by name or id; repeatable (default: all).")
@click.option("--as", "new_name", help="Restore the topic under this name. Needs exactly one --topic.")
@click.option(
    "--replication-factor",
    "factor",
    type=Integer(1, REPLICATION_FACTOR_MAX),
    help="Replication factor of new records (default: that of each topic; 1 with --data, because `up` has one bookie).",
)
@click.option(
    "--to-offset",
    "to_offsets",
    multiple=True,
    metavar="PARTITION=OFFSET",
    help="Restore this partition up to this offset, exclusive; repeatable (default: all of it). Needs exactly one --topic.",
)
@click.option(
    "--to-time",
    metavar="TIME",
    help=f"Restore each partition up to its first record at this time or later, exclusive: {TIMES}.",
)
@click.option("--dry-run", is_flag=True, help="Show what the bucket holds; change nothing.")
@yes_option
@json_option
def restore(
    url: str,
    data: Path | None,
    metadata: str | None,
    topics: tuple[str, ...],
    new_name: str | None,
    factor: int | None,
    to_offsets: tuple[str, ...],
    to_time: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Restore topics from their bucket into an empty directory, or into a cluster.

    Topics are restored with their configs and all records that were offloaded. Records that were only on bookies are not in
    the bucket. Committed offsets of groups and transactional ids are restored as brokers last stored them; an offset past the
    restored end of its partition is set to that end, and listed.

    Without --topic, the report names the deleted topics that are left out. So are topics whose descriptor is damaged: the
    command restores the others, names the descriptors and exits with 6.

    The cluster takes over the bucket: tiering workers of its former cluster delete nothing more and stop committing within a
    second. Nothing is deleted from the bucket for one grace period. If the command fails, run it again: no topic is restored
    twice.

    With --to-offset or --to-time, topics are restored without their last records. The cut is at the end of the last record
    batch before the given point that leaves no transaction open. The report names what is left out; it stays in the bucket for
    the grace period.
    """
    if new_name is not None and len(topics) != 1:
        raise Invalid("--as needs exactly one --topic")
    points = cut_points(to_offsets, to_time, topics)
    if not dry_run and (data is None) == (metadata is None):
        raise Invalid("name where to restore to: either --data DIR or --metadata HOST:PORT,…")
    if data is not None and not dry_run:
        refuse_cluster(data.absolute(), "start its metadata nodes and name them with --metadata")
        factor = factor or 1
    url = existing_store(url)
    rows, groups, left_out, damaged = asyncio.run(
        _restore(
            url, data.absolute() if data is not None else None, metadata, topics, new_name, factor, points, dry_run=dry_run,
            yes=yes,
        )
    )  # fmt: skip
    if as_json:
        print_json({"partitions": rows, **groups.document(), "deleted_topics": left_out})
        _refuse_damaged(damaged)
        return
    print_rows(rows, _COLUMNS if points is None else (*_COLUMNS[:-1], "left_out_records", "left_out_end_offset", "state"))
    records, size = sum(row["records"] for row in rows), human_bytes(sum(row["bytes"] for row in rows))
    outcome = "can be restored" if dry_run else "are restored"
    click.echo(f"{records} records ({size}) {outcome}; records at or above the end offset were not offloaded", err=True)
    groups.show()
    _show_left_out(left_out)
    _refuse_damaged(damaged)


async def _restore(
    url: str,
    data: Path | None,
    metadata: str | None,
    topics: tuple[str, ...],
    new_name: str | None,
    factor: int | None,
    points: Points | None,
    *,
    dry_run: bool,
    yes: bool,
) -> tuple[list[Row], GroupsReport, list[Row], list[Corrupt]]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(store_session(url))
        found = await readable_topics(store)
        wanted = topics_to_restore(store.url, found, topics)
        check_points(points, wanted)
        left_out = [] if topics else await _left_out(store, found)
        damaged = [] if topics else [*found.damaged.values()]
        if not dry_run:
            # The former owner of the bucket may still delete from it.
            leased = [topic.topic_id for topic in wanted] if topics else []
            await stack.enter_async_context(reader_lease(store, "restore", leased))
        histories = await _histories(store, wanted, "reading manifests")
        if dry_run:
            return *await _planned(store, histories, points, new_name), left_out, damaged
        if data is not None and not _has_quorum(data):
            # Ask before anything is written. The bucket's owner, if there is one, is another cluster.
            await _confirm_takeover(store, "", yes=yes)
            yes = True
        async with _quorum(data, metadata, url) as client:
            cluster_id = await _cluster_id(client)
            for history in histories:
                # Raises if another topic has the name. Check it before the takeover of the bucket.
                is_known(client.view, history, new_name or history.descriptor.name)
            await _confirm_takeover(store, cluster_id, yes=yes)
            # Read the histories again: the former owner may have committed since. The first read, before any change, proved
            # them readable.
            restored = await _restored(store, client, cluster_id, wanted, topics, points, new_name, factor)
            rows = [
                row
                for history, done in restored.topics
                for row in _rows(history, new_name, "restored" if done else "known already")
            ]
            await client.refresh(_FOUND_S)
            now_ms, number = SystemClock().wall_ms(), restored.owner.number
            ends = await bucket_topics(client.view, store)
            groups = await restore_groups(client, store, ends, factor, number, cluster_id, now_ms)
            return rows, groups, left_out, damaged


async def _left_out(store: ObjectStore, topics: ReadTopics) -> list[Row]:
    """A row for each topic that the bucket says is deleted; without times if its marker cannot be read."""
    return [
        {
            "topic": topic.name,
            "topic_id": str(topic.topic_id),
            "marker": deletion_marker_key(topic.topic_id),
            "deleted_at": format_moment(marker.deleted_at_ms) if marker is not None else None,
            "restorable_until": format_moment(marker.deleted_at_ms + marker.restorable_ms) if marker is not None else None,
        }
        for topic, marker in await deleted_topics(store, topics)
    ]


def _show_left_out(rows: Sequence[Row]) -> None:
    for row in rows[:_SHOWN_MAX]:
        when = f"at {row['deleted_at']}" if row["deleted_at"] else f"as {row['marker']} says, which cannot be read"
        click.echo(f"left out: {row['topic']} ({row['topic_id']}), deleted {when}", err=True)
    if len(rows) > _SHOWN_MAX:
        click.echo(f"left out: {len(rows) - _SHOWN_MAX} more deleted topics; --json lists them", err=True)


def _refuse_damaged(damaged: Sequence[Corrupt]) -> None:
    """Raise ``Corrupt`` if topics were left out because their descriptors are damaged."""
    if damaged:
        problems = "; ".join(error.message for error in damaged[:_SHOWN_MAX])
        remedy = "put intact descriptors in their place, then run the command again before brokers start"
        raise Corrupt(f"{len(damaged)} topics are left out, because their descriptors are damaged: {problems}; {remedy}")


async def _histories(store: ObjectStore, wanted: Sequence[TopicDescriptor], title: str) -> list[TopicHistory]:
    with _progress(wanted, title) as on_partition:
        return await read_history(store, wanted, on_partition)


@contextmanager
def _progress(wanted: Sequence[TopicDescriptor], title: str) -> Iterator[Callable[[], None]]:
    """Show how many partitions have been read. Yields a function to call for each."""
    with progress_bar() as progress:
        task = progress.add_task(title, total=sum(topic.partition_count for topic in wanted))
        yield lambda: progress.advance(task)


def cut_points(to_offsets: Sequence[str], to_time: str | None, topics: Sequence[str]) -> Points | None:
    """The points up to which to restore; None: everything. Raises ``Invalid``."""
    if to_time is not None:
        if to_offsets:
            raise Invalid("--to-offset and --to-time cannot be combined: choose one")
        return CutPoint(timestamp_ms=moment_ms(to_time))
    if not to_offsets:
        return None
    if len(topics) != 1:
        raise Invalid("--to-offset needs exactly one --topic")
    points: dict[int, CutPoint] = {}
    for partition, offset in name_values(to_offsets).items():
        number, end = natural_number(partition), natural_number(offset)
        if number is None or end is None:
            raise Invalid(f"--to-offset takes PARTITION=OFFSET, such as 0=1500, not {partition}={offset}")
        points[number] = CutPoint(offset=end)
    return points


def check_points(points: Points | None, topics: Sequence[TopicDescriptor]) -> None:
    """Raise ``NotFound`` if a point is of a partition that a topic does not have: it would cut nothing."""
    for topic in topics:
        unknown = () if points is None or isinstance(points, CutPoint) else points.keys() - set(range(topic.partition_count))
        for partition in sorted(unknown):
            raise NotFound(f"topic {topic.name} has {topic.partition_count} partitions, none with number {partition}")


async def _restored(
    store: ObjectStore,
    client: MetadataClient,
    cluster_id: str,
    wanted: Sequence[TopicDescriptor],
    names: Sequence[str],
    points: Points | None,
    new_name: str | None,
    factor: int | None,
) -> RestoredTopics:
    with _cut_ports(store, cluster_id) as ports, _progress(wanted, "reading manifests again") as on_partition:
        return await restore_topics(
            client, ports, names, points=points, new_name=new_name, replication_factor=factor, on_partition=on_partition
        )


@contextmanager
def _cut_ports(store: ObjectStore, cluster_id: str) -> Iterator[CutPorts]:
    background = ThreadBackground(_THREADS, "cut")
    try:
        yield CutPorts(
            store=store, clock=SystemClock(), background=background,
            random_id=lambda: random.SystemRandom().getrandbits(64), cluster_id=cluster_id,
        )  # fmt: skip
    finally:
        background.close()


async def _planned(
    store: ObjectStore, histories: Sequence[TopicHistory], points: Points | None, new_name: str | None
) -> tuple[list[dict[str, Any]], GroupsReport]:
    rows: list[dict[str, Any]] = []
    for history in histories:
        if points is None:
            rows += _rows(history, new_name, "in the bucket")
        else:
            rows += await _planned_rows(store, history, points, new_name)
    owner = await read_owner(store)
    return rows, await planned_groups(store, ends_in_rows(histories, rows), owner.number + 1 if owner is not None else 0)


async def _planned_rows(
    store: ObjectStore, history: TopicHistory, points: Points, new_name: str | None
) -> list[dict[str, Any]]:
    """The rows of a dry run. How many records would be left out is known when the segment with the cut is written."""
    with _cut_ports(store, "") as ports:
        cuts = await planned_cuts(ports, history, points)
    rows = _rows(history, new_name, "in the bucket")
    for row in rows:
        if row["partition"] in cuts:
            row["left_out_end_offset"], row["end_offset"] = row["end_offset"], cuts[row["partition"]]
            row["left_out_records"] = None
    return rows


async def _confirm_takeover(store: ObjectStore, cluster_id: str, *, yes: bool) -> None:
    owner = await read_owner(store)
    if owner is not None and owner.cluster_id != cluster_id:
        confirm(f"Take {store.url} over from cluster {owner.cluster_id}? If it still runs, it can no longer offload.", yes=yes)


def _has_quorum(data: Path) -> bool:
    """Whether a metadata node has run on the directory."""
    return (data / "metadata").exists()


@asynccontextmanager
async def _quorum(data: Path | None, metadata: str | None, url: str) -> AsyncIterator[MetadataClient]:
    """Yield a client of the metadata nodes, or of a node that runs on ``data`` in this process until the context ends."""
    if data is None:
        async with metadata_session(metadata_of(None, metadata)) as client:
            yield client
        return
    from stratalog.roles import embedded
    from stratalog.roles import metadata as metadata_role
    from stratalog.roles.runtime import Configuration, Node

    overrides = embedded.embedded_overrides(data, kafka="127.0.0.1:0", store=url)
    async with AsyncExitStack() as stack:
        node = Node(Configuration(file=None, overrides=overrides), stack)
        await node.files(data)
        address = await metadata_role.start(node)
        async with metadata_session([address]) as client:
            yield client


async def _cluster_id(client: MetadataClient) -> str:
    """The cluster's id, which a new quorum writes when it has a leader. Raises ``Unavailable``."""
    for _ in range(int(_FOUND_S / _RETRY_S)):
        try:
            return cluster_id_in(client)
        except Unavailable:
            await asyncio.sleep(_RETRY_S)
    return cluster_id_in(client)


def _rows(history: TopicHistory, new_name: str | None, state: str) -> list[dict[str, Any]]:
    return [
        {
            "topic": new_name or history.descriptor.name,
            "partition": found.index,
            "start_offset": found.pointer.start_offset if found.pointer is not None else 0,
            "end_offset": found.pointer.end_offset if found.pointer is not None else 0,
            "records": found.record_count,
            "bytes": found.pointer.cold_bytes if found.pointer is not None else 0,
            "left_out_records": found.left_out_records,
            "left_out_end_offset": found.left_out_end_offset or None,
            "state": state,
        }
        for found in history.partitions
    ]
