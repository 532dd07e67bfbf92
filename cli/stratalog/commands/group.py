"""``stratalog group …``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import click
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, ConsumerGroupListing

from stratalog import kafka
from stratalog.command_group import CommandGroup, examples
from stratalog.deletion import confirm, yes_option
from stratalog.offset_deletion import delete_offsets as delete_committed
from stratalog.output import json_option, print_done, print_json, print_listing, print_rows
from stratalog.parameters import partitions_option, valid_name
from stratalog.places import TARGETS, bounds, places
from stratalog.several import with_each
from stratalog.target import bootstrap_of, kafka_options
from stratalog_core.errors import Conflict, NotFound
from stratalog_core.kafka_clients import as_ours, retried


@click.group(cls=CommandGroup)
def group() -> None:
    """List, describe, reset and delete consumer groups."""


@group.command("list")
@kafka_options
@json_option
def list_groups(data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """List consumer groups with their states."""
    address = bootstrap_of(data, bootstrap)
    found = retried(lambda: _listed(address), kafka.TIMEOUT_S)
    rows = [{"group": entry.group_id, "state": entry.state.name.lower()} for entry in found]
    print_listing("groups", sorted(rows, key=lambda row: row["group"]), ("group", "state"), as_json=as_json)


@group.command()
@click.argument("name", callback=valid_name)
@kafka_options
@json_option
def describe(name: str, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """Show a group's members, committed offsets and lag.

    The lag is unknown for a topic that was deleted, and for a partition for which a member has committed nothing yet.
    """
    address = bootstrap_of(data, bootstrap)
    found = kafka.of_group(address, lambda client: client.describe_consumer_groups([name], request_timeout=kafka.TIMEOUT_S))
    members = [
        {
            "member": member.member_id,
            "client": member.client_id,
            "host": member.host,
            "partitions": [f"{place.topic}-{place.partition}" for place in member.assignment.topic_partitions],
        }
        for member in found.members
    ]
    assigned = {(place.topic, place.partition) for member in found.members for place in member.assignment.topic_partitions}
    offsets = _lag_rows(address, _committed(address, name), assigned)
    lags = [row["lag"] for row in offsets if row["lag"] is not None]
    total = sum(lags) if lags else None
    state = found.state.name.lower()
    if not members and not offsets and state in ("dead", "unknown"):
        raise NotFound(f"no group {name!r}: see `stratalog group list`")
    if as_json:
        print_json({"group": name, "state": state, "lag": total, "members": members, "offsets": offsets})
        return
    click.echo(f"{name}: {state}" + (f", lag {total}" if total is not None else ""))
    if members:
        print_rows(members, ("member", "client", "host", "partitions"))
    print_rows(offsets, ("topic", "partition", "committed_offset", "latest_offset", "lag"))


@group.command(
    epilog=examples(
        "stratalog group reset readers events --to earliest --dry-run",
        "stratalog group reset readers events --to time:2013-07-04",
    )
)
@click.argument("name", callback=valid_name)
@click.argument("topic", callback=valid_name)
@click.option("--to", "target", required=True, metavar="OFFSET", help=f"New offset: {TARGETS}")
@partitions_option("Only this partition; repeatable.")
@click.option("--dry-run", is_flag=True, help="Show the new offsets without setting them.")
@yes_option
@kafka_options
@json_option
def reset(
    name: str,
    topic: str,
    target: str,
    partitions: tuple[int, ...],
    dry_run: bool,
    yes: bool,
    data: Path | None,
    bootstrap: str | None,
    as_json: bool,
) -> None:
    """Set a group's committed offsets for TOPIC. The group must have no members."""
    address = bootstrap_of(data, bootstrap)
    wanted = kafka.partitions_of(kafka.admin(address).list_topics, topic, partitions)
    reader = kafka.consumer(address, {"group.id": name})
    try:
        found = places(reader, topic, wanted, target)
    finally:
        reader.close()
    if not dry_run:
        confirm(f"Set the offsets of group {name} for {len(found)} partitions of {topic} to {target}?", yes=yes)
        _set_offsets(address, name, found)
    rows = [{"topic": topic, "partition": place.partition, "committed_offset": place.offset} for place in found]
    print_listing("offsets", rows, ("topic", "partition", "committed_offset"), as_json=as_json)


@group.command()
@click.argument("names", nargs=-1, required=True, callback=valid_name)
@yes_option
@kafka_options
@json_option
def delete(names: tuple[str, ...], yes: bool, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """Delete groups that have no members, with their committed offsets."""
    address, listed = bootstrap_of(data, bootstrap), ", ".join(names)
    confirm(f"Delete {listed} and all their committed offsets?", yes=yes)
    with_each(list(dict.fromkeys(names)), partial(_delete, address), "deleted")
    print_done({"deleted": list(names)}, f"deleted {listed}", as_json=as_json)


@group.command("delete-offsets")
@click.argument("name", callback=valid_name)
@click.argument("topic", callback=valid_name)
@partitions_option("Only this partition; repeatable.")
@yes_option
@kafka_options
@json_option
def delete_offsets(
    name: str, topic: str, partitions: tuple[int, ...], yes: bool, data: Path | None, bootstrap: str | None, as_json: bool
) -> None:
    """Delete group NAME's committed offsets for TOPIC. No member may be subscribed to TOPIC."""
    address = bootstrap_of(data, bootstrap)
    client = kafka.admin(address)
    wanted = list(partitions) or kafka.partitions_of(client.list_topics, topic)
    confirm(f"Delete the offsets of group {name} for {len(wanted)} partitions of {topic}?", yes=yes)
    asyncio.run(delete_committed(address, name, topic, wanted))
    document = {"group": name, "topic": topic, "partitions": wanted}
    print_done(document, f"deleted the offsets of group {name} for {len(wanted)} partitions of {topic}", as_json=as_json)


def _delete(address: str, name: str) -> None:
    def ask(client: AdminClient) -> Mapping[str, Future[None]]:
        found: Mapping[str, Future[None]] = client.delete_consumer_groups([name], request_timeout=kafka.TIMEOUT_S)
        return found

    try:
        kafka.of_group(address, ask)
    except NotFound as missing:
        raise NotFound(f"no group {name!r}: see `stratalog group list`") from missing


def _set_offsets(address: str, name: str, wanted: list[TopicPartition]) -> None:
    """Set the committed offsets. Raises ``Conflict`` if the group has members, and the first failure of a partition."""
    change = ConsumerGroupTopicPartitions(name, wanted)
    answer = kafka.of_group(
        address, lambda client: client.alter_consumer_group_offsets([change], request_timeout=kafka.TIMEOUT_S)
    )
    failed = [place for place in answer.topic_partitions if place.error is not None]
    if failed:
        failure = as_ours(failed[0].error)
        remedy = "; stop the members of the group first" if isinstance(failure, Conflict) else ""
        places_text = f"{len(failed)} of {len(wanted)} partitions, such as {failed[0].topic}-{failed[0].partition}"
        failure.message = f"the offsets of group {name} are not set in {places_text}: {failure.message}{remedy}"
        raise failure


def _listed(address: str) -> list[ConsumerGroupListing]:
    """Return the groups of all coordinators."""
    client = kafka.admin(address)
    found = client.list_consumer_groups(request_timeout=kafka.TIMEOUT_S).result()
    for failure in found.errors:
        raise as_ours(failure)
    groups: list[ConsumerGroupListing] = found.valid
    return groups


def _committed(address: str, name: str) -> list[TopicPartition]:
    request = [ConsumerGroupTopicPartitions(name)]
    answer = kafka.of_group(
        address, lambda client: client.list_consumer_group_offsets(request, request_timeout=kafka.TIMEOUT_S)
    )
    return [place for place in answer.topic_partitions if place.offset >= 0]


def _lag_rows(address: str, committed: list[TopicPartition], assigned: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return a row per partition that has a committed offset or is ``assigned`` to a member."""
    without = assigned - {(place.topic, place.partition) for place in committed}
    wanted = [*committed, *(TopicPartition(topic, partition) for topic, partition in without)]
    if not wanted:
        return []
    reader = kafka.consumer(address, {"group.id": "stratalog-cli"})
    try:
        return [_lag_row(place, _end(reader, place)) for place in sorted(wanted)]
    finally:
        reader.close()


def _end(reader: Consumer, place: TopicPartition) -> int | None:
    """Return the end offset of a partition; None if its topic was deleted after the group committed."""
    try:
        return bounds(reader, place)[1]
    except NotFound:
        return None


def _lag_row(place: TopicPartition, latest: int | None) -> dict[str, Any]:
    committed = place.offset if place.offset >= 0 else None
    return {
        "topic": place.topic,
        "partition": place.partition,
        "committed_offset": committed,
        "latest_offset": latest,
        "lag": max(0, latest - committed) if latest is not None and committed is not None else None,
    }
