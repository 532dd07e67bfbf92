"""``stratalog topic …``."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import click
from confluent_kafka import TopicCollection, TopicPartition
from confluent_kafka.admin import DeletedRecords, NewPartitions, NewTopic, OffsetSpec

from stratalog import kafka
from stratalog.command_group import CommandGroup, examples
from stratalog.commands.topic_config import config, source_of, topic_configs
from stratalog.config_values import config_values
from stratalog.deletion import confirm, yes_option
from stratalog.output import json_option, print_done, print_json, print_listing, print_rows
from stratalog.parameters import Integer, partitions_option, valid_name
from stratalog.places import TARGETS, places
from stratalog.refusals import explained
from stratalog.several import with_each
from stratalog.target import bootstrap_of, cluster_options, kafka_options, metadata_of, quorum_options
from stratalog.tier.session import metadata_session
from stratalog.topic_deletion import (
    BUCKET_TIMEOUT_S,
    DELETED_COLUMNS,
    InBucket,
    delete_named,
    delete_now,
    deleted_rows,
    restore,
)
from stratalog.waiting import timeout_option, wait_option
from stratalog_broker.admin.replication_factor import change_replication_factor
from stratalog_core.errors import Invalid, NotFound, StratalogError
from stratalog_core.kafka_clients import uuid_of
from stratalog_metadata.records import REPLICATION_FACTOR_MAX, Topic

_CLUSTERS_DEFAULT = -1
_RETRY_S = 0.2
_SHOWN_MAX = 5


@click.group(cls=CommandGroup)
def topic() -> None:
    """Create, list, describe, alter, delete and configure topics, and delete their records."""


topic.add_command(config)


@topic.command(
    epilog=examples(
        "stratalog topic create events",
        "stratalog topic create events --partitions 3 --config retention.ms=604800000",
    )
)
@click.argument("name", callback=valid_name)
@click.option("--partitions", type=Integer(1, 10_000), help="Number of partitions (default: the cluster's).")
@click.option(
    "--replication-factor", type=Integer(1, REPLICATION_FACTOR_MAX), help="Copies of each record (default: the cluster's)."
)
@click.option("--config", "configs", multiple=True, metavar="NAME=VALUE", help="Topic config, by Kafka's name; repeatable.")
@kafka_options
@json_option
def create(
    name: str,
    partitions: int | None,
    replication_factor: int | None,
    configs: tuple[str, ...],
    data: Path | None,
    bootstrap: str | None,
    as_json: bool,
) -> None:
    """Create a topic."""
    client = kafka.admin(bootstrap_of(data, bootstrap))
    new = NewTopic(
        name,
        num_partitions=partitions or _CLUSTERS_DEFAULT,
        replication_factor=replication_factor or _CLUSTERS_DEFAULT,
        config=config_values(configs),
    )
    kafka.only(client.create_topics([new], request_timeout=kafka.TIMEOUT_S))
    count = partitions or _partition_count(client, name)
    sentence = f"created {name} with {count} partition{'s' if count > 1 else ''}"
    print_done({"name": name, "partitions": count}, sentence, as_json=as_json)


def _partition_count(client: Any, name: str) -> int:
    """Return the partition count of a new topic. Retries until the topic has reached the broker."""
    deadline = time.monotonic() + kafka.TIMEOUT_S
    while True:
        try:
            return len(kafka.partitions_of(client.list_topics, name))
        except NotFound:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_S)


@topic.command()
@click.argument("name", callback=valid_name)
@click.option("--partitions", type=Integer(1, 10_000), help="New number of partitions; it can only grow.")
@click.option("--replication-factor", "factor", type=Integer(1, REPLICATION_FACTOR_MAX), help="Copies of each new record.")
@cluster_options
@json_option
def alter(
    name: str,
    partitions: int | None,
    factor: int | None,
    data: Path | None,
    bootstrap: str | None,
    metadata: str | None,
    as_json: bool,
) -> None:
    """Add partitions to a topic, or change its replication factor. Internal topics can be altered, too.

    After partitions are added, records of a key may go to a different partition. A new replication factor applies to new
    records: open ledgers are rolled at once, sealed ledgers keep the copies that they have.
    """
    if partitions is None and factor is None:
        raise click.UsageError("nothing to change: give --partitions or --replication-factor")
    done: dict[str, Any] = {"name": name}
    if factor is not None:
        changed = asyncio.run(_change_factor(metadata_of(data, metadata), name, factor))
        done["replication_factor"] = changed.replication_factor
    if partitions is not None:
        client = kafka.admin(bootstrap_of(data, bootstrap))
        try:
            kafka.only(client.create_partitions([NewPartitions(name, partitions)], request_timeout=kafka.TIMEOUT_S))
        except StratalogError as failure:
            if factor is not None:
                failure.message += f"; the replication factor is already changed to {factor}"
            raise
        done["partitions"] = partitions
    now = ", ".join(f"{what.replace('_', ' ')} {value}" for what, value in done.items() if what != "name")
    print_done(done, f"changed {name}: {now}", as_json=as_json)


async def _change_factor(addresses: list[str], name: str, factor: int) -> Topic:
    async with metadata_session(addresses) as client:
        return await change_replication_factor(client, name, factor)


@topic.command(
    "delete-records",
    epilog=examples(
        "stratalog topic delete-records events --before time:30d",
        "stratalog topic delete-records events --before 1000 --partition 0",
    ),
)
@click.argument("name", callback=valid_name)
@click.option("--before", "target", required=True, metavar="OFFSET", help=f"First offset to keep: {TARGETS}")
@partitions_option("Only this partition; repeatable.")
@yes_option
@kafka_options
@json_option
def delete_records(
    name: str, target: str, partitions: tuple[int, ...], yes: bool, data: Path | None, bootstrap: str | None, as_json: bool
) -> None:
    """Delete a topic's oldest records, from bookies and from the object store."""
    address = bootstrap_of(data, bootstrap)
    client = kafka.admin(address)
    wanted = kafka.partitions_of(client.list_topics, name, partitions)
    reader = kafka.consumer(address, {"group.id": "stratalog-cli"})
    try:
        found = places(reader, name, wanted, target)
    finally:
        reader.close()
    confirm(f"Delete the records of {_shown(found)}?", yes=yes)
    futures = client.delete_records(found, request_timeout=kafka.TIMEOUT_S)
    with explained(partial(topic_configs, client), [name], data):
        starts = low_watermarks(futures)
    rows = [{"topic": name, "partition": partition, "earliest_offset": start} for partition, start in sorted(starts.items())]
    print_listing("partitions", rows, ("topic", "partition", "earliest_offset"), as_json=as_json)


def low_watermarks(futures: Mapping[TopicPartition, Future[DeletedRecords]]) -> dict[int, int]:
    """Return the first offsets after a deletion by partition. Raises as `with_each`."""
    places, starts = {f"{place.topic}-{place.partition}": place for place in futures}, dict[int, int]()

    def wait(name: str) -> None:
        starts[places[name].partition] = kafka.only({name: futures[places[name]]}).low_watermark

    with_each([*places], wait, "deleted records of")
    return starts


def _shown(found: list[TopicPartition]) -> str:
    shown = ", ".join(f"{place.topic}-{place.partition} before offset {place.offset}" for place in found[:_SHOWN_MAX])
    return shown + (f" and {len(found) - _SHOWN_MAX} more partitions" if len(found) > _SHOWN_MAX else "")


@topic.command("list")
@click.option("--pattern", metavar="REGEX", help="Only topics whose whole name matches this regular expression.")
@click.option("--internal", is_flag=True, help="Show internal topics, too.")
@click.option("--deleted", is_flag=True, help="Show deleted topics that can be restored instead, and for how long.")
@cluster_options
@json_option
def list_topics(
    pattern: str | None,
    internal: bool,
    deleted: bool,
    data: Path | None,
    bootstrap: str | None,
    metadata: str | None,
    as_json: bool,
) -> None:
    """List topics with their numbers of partitions."""
    matches = _matching(pattern)
    if deleted:
        rows = [row for row in asyncio.run(deleted_rows(metadata_of(data, metadata))) if matches(row["name"])]
        print_listing("deleted_topics", rows, DELETED_COLUMNS, as_json=as_json)
        return
    topics = kafka.listed(kafka.admin(bootstrap_of(data, bootstrap)).list_topics).topics
    rows = [
        {"name": name, "partitions": len(found.partitions)}
        for name, found in sorted(topics.items())
        if matches(name) and (internal or not name.startswith("__"))
    ]
    print_listing("topics", rows, ("name", "partitions"), as_json=as_json)


def _matching(pattern: str | None) -> Callable[[str], object]:
    """Return a function that says whether a name matches. Raises ``Invalid``."""
    if pattern is None:
        return lambda name: True
    try:
        return re.compile(pattern).fullmatch
    except re.error as wrong:
        raise Invalid(
            f"--pattern {pattern!r} is not a regular expression: {wrong}; 'a.*' matches what begins with a"
        ) from wrong


@topic.command()
@click.argument("name", callback=valid_name)
@kafka_options
@json_option
def describe(name: str, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """Show a topic's id, partitions, offsets and changed configs."""
    servers = bootstrap_of(data, bootstrap)
    client = kafka.admin(servers)
    rows = _partition_rows(client, servers, name)
    entries = topic_configs(client, name)
    topic_id, factor = _topic_id(client, name), len(rows[0]["replicas"])
    changed = {entry.name: entry.value for entry in entries.values() if source_of(entry) == "topic"}
    if as_json:
        everything = {entry.name: entry.value for entry in entries.values()}
        document = {"name": name, "topic_id": topic_id, "replication_factor": factor, "partitions": rows}
        print_json(document | {"configs": everything, "changed_configs": changed})
        return
    print_rows(
        rows,
        ("partition", "leader", "replicas", "in_sync", "earliest_offset", "latest_offset", "records"),
        title=f"{name}: replication factor {factor}, topic id {topic_id}",
    )
    for setting, value in sorted(changed.items()):
        click.echo(f"{setting} = {value}")


def _topic_id(client: Any, name: str) -> str:
    """Return a topic's id, as options of other commands take it."""
    found = kafka.only(client.describe_topics(TopicCollection([name]), request_timeout=kafka.TIMEOUT_S))
    return str(uuid_of(found.topic_id))


def _partition_rows(client: Any, servers: str, name: str) -> list[dict[str, Any]]:
    found = kafka.topic_of(client.list_topics, name).partitions
    partitions = sorted(found)
    earliest = _offsets(servers, name, partitions, OffsetSpec.earliest())
    latest = _offsets(servers, name, partitions, OffsetSpec.latest())
    return [
        {
            "partition": partition,
            "leader": found[partition].leader,
            "replicas": list(found[partition].replicas),
            "in_sync": list(found[partition].isrs),
            "earliest_offset": earliest[partition],
            "latest_offset": latest[partition],
            "records": latest[partition] - earliest[partition],
        }
        for partition in partitions
    ]


def _offsets(servers: str, name: str, partitions: list[int], spec: OffsetSpec) -> dict[int, int]:
    found = kafka.list_offsets(servers, {TopicPartition(name, partition): spec for partition in partitions})
    return {partition: offset for (_, partition), offset in found.items()}


@topic.command()
@click.argument("names", nargs=-1, required=True, callback=valid_name)
@click.option(
    "--now",
    is_flag=True,
    help="Delete permanently and free the space. Also takes topics that are already deleted, by name or id.",
)
@yes_option
@cluster_options
@json_option
def delete(
    names: tuple[str, ...],
    now: bool,
    yes: bool,
    data: Path | None,
    bootstrap: str | None,
    metadata: str | None,
    as_json: bool,
) -> None:
    """Delete topics with all their records, including history in the object store.

    `stratalog topic undelete` can restore them, by default for 24 hours ([broker] undelete_window_ms). After --now nothing can.
    """
    client = kafka.admin(bootstrap_of(data, bootstrap))
    call = partial(client.delete_topics, request_timeout=kafka.TIMEOUT_S)
    listed = ", ".join(names)
    if not now:
        confirm(f"Delete {listed} and all their records?", yes=yes)
        with explained(partial(topic_configs, client), names, data, metadata):
            delete_named(call, list(names))
        print_done({"deleted": list(names)}, f"deleted {listed}", as_json=as_json)
        return
    confirm(f"Delete {listed} and all their records for good?", yes=yes)
    with explained(partial(topic_configs, client), names, data, metadata):
        asyncio.run(delete_now(metadata_of(data, metadata), names, call))
    print_done({"deleted": list(names)}, f"deleted {listed} for good", as_json=as_json)


@topic.command()
@click.argument("wanted", metavar="NAME|ID")
@click.option("--as", "new_name", metavar="NEWNAME", help="Name for the restored topic, if its old one is taken.")
@wait_option("the topic's deletion marker is gone from the bucket", default=True)
@timeout_option(BUCKET_TIMEOUT_S, "Seconds to wait for a tiering worker.")
@quorum_options
@json_option
def undelete(
    wanted: str,
    new_name: str | None,
    wait: bool,
    timeout_s: float,
    data: Path | None,
    metadata: str | None,
    as_json: bool,
) -> None:
    """Restore a deleted topic: its records, its configs, and the committed offsets of its groups.

    `stratalog topic list --deleted` shows what can be restored and for how long. Under another name, groups have no committed
    offsets.

    Waits until a tiering worker has removed the topic's deletion marker from the bucket: before that, a restore from the bucket
    would leave the topic out. If the marker is not removed in time, the command exits with 3, and clients can use the topic all
    the same. Run it again to wait: it takes the id of a restored topic, too.
    """
    restored, in_bucket = asyncio.run(restore(metadata_of(data, metadata), wanted, new_name, timeout_s if wait else None))
    document = {
        "name": restored.name,
        "topic_id": str(restored.topic_id),
        "partitions": restored.partition_count,
        "in_bucket": in_bucket,
    }
    later = "; a restore from the bucket may leave it out until a tiering worker has removed its deletion marker"
    sentence = f"restored {restored.name}{later if in_bucket is InBucket.UNCONFIRMED else ''}"
    print_done(document, sentence, as_json=as_json)
