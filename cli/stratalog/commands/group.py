"""``stratalog group …``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from stratalog import kafka
from stratalog.moments import parse_moment
from stratalog.output import json_option, print_json, print_listing, print_rows
from stratalog.target import bootstrap_of, kafka_options
from stratalog_core.errors import Invalid, NotFound


@click.group()
def group() -> None:
    """List, describe and reset consumer groups."""


@group.command("list")
@kafka_options
@json_option
def list_groups(data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """List groups."""
    client = kafka.admin(bootstrap_of(data, bootstrap))
    with kafka.translated():
        found = client.list_consumer_groups(request_timeout=kafka.TIMEOUT_S).result()
    for failure in found.errors:
        raise kafka.as_ours(failure)
    rows = [{"group": entry.group_id, "state": entry.state.name.lower()} for entry in found.valid]
    print_listing("groups", sorted(rows, key=lambda row: row["group"]), ("group", "state"), as_json=as_json)


@group.command()
@click.argument("name")
@kafka_options
@json_option
def describe(name: str, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """Show a group's members, committed offsets and lag."""
    address = bootstrap_of(data, bootstrap)
    client = kafka.admin(address)
    found = kafka.only(client.describe_consumer_groups([name], request_timeout=kafka.TIMEOUT_S))
    members = [
        {
            "member": member.member_id,
            "client": member.client_id,
            "host": member.host,
            "partitions": [f"{place.topic}-{place.partition}" for place in member.assignment.topic_partitions],
        }
        for member in found.members
    ]
    offsets = _lag_rows(address, _committed(client, name))
    state = found.state.name.lower()
    if not members and not offsets and state in ("dead", "unknown"):
        raise NotFound(f"no group {name!r}: see `stratalog group list`")
    if as_json:
        print_json({"group": name, "state": state, "members": members, "offsets": offsets})
        return
    click.echo(f"{name}: {state}")
    print_rows(members, ("member", "client", "host", "partitions"))
    print_rows(offsets, ("topic", "partition", "committed_offset", "latest_offset", "lag"))


@group.command()
@click.argument("name")
@click.argument("topic")
@click.option("--to", "target", required=True, help="earliest, latest, a number, or time:MOMENT as time:2013-07-04.")
@click.option("--partition", "partitions", multiple=True, type=int, help="Only this partition; repeatable.")
@click.option("--dry-run", is_flag=True, help="Only show what would be set.")
@kafka_options
@json_option
def reset(
    name: str,
    topic: str,
    target: str,
    partitions: tuple[int, ...],
    dry_run: bool,
    data: Path | None,
    bootstrap: str | None,
    as_json: bool,
) -> None:
    """Set the offsets that a group without members has committed for TOPIC."""
    address = bootstrap_of(data, bootstrap)
    client = kafka.admin(address)
    wanted = list(partitions) or kafka.partitions_of(client.list_topics, topic)
    reader = kafka.consumer(address, {"group.id": name})
    try:
        places = _places(reader, topic, wanted, target)
    finally:
        reader.close()
    if not dry_run:
        change = ConsumerGroupTopicPartitions(name, places)
        kafka.only(client.alter_consumer_group_offsets([change], request_timeout=kafka.TIMEOUT_S))
    rows = [{"topic": topic, "partition": place.partition, "committed_offset": place.offset} for place in places]
    print_listing("offsets", rows, ("topic", "partition", "committed_offset"), as_json=as_json)


def _places(reader: Consumer, topic: str, partitions: list[int], target: str) -> list[TopicPartition]:
    """Where each partition's offset goes; numbers are kept within what exists."""
    if target.startswith("time:"):
        moment_ms = parse_moment(target.removeprefix("time:"), now_ms=int(time.time() * 1000))
        found = kafka.offsets_at(reader, topic, partitions, moment_ms)
        return [_no_later_than_end(reader, place) for place in found]
    if target not in ("earliest", "latest") and not target.isdecimal():
        raise Invalid(f"--to {target!r}: give earliest, latest, a number or time:MOMENT")
    places = []
    for partition in partitions:
        low, high = _bounds(reader, TopicPartition(topic, partition))
        named = {"earliest": low, "latest": high}
        offset = named[target] if target in named else min(max(int(target), low), high)
        places.append(TopicPartition(topic, partition, offset))
    return places


def _no_later_than_end(reader: Consumer, place: TopicPartition) -> TopicPartition:
    if place.offset >= 0:
        return place
    return TopicPartition(place.topic, place.partition, _bounds(reader, place)[1])


def _bounds(reader: Consumer, place: TopicPartition) -> tuple[int, int]:
    with kafka.translated():
        bounds = reader.get_watermark_offsets(place, timeout=kafka.TIMEOUT_S)
    if bounds is None:
        raise NotFound(f"no offsets of {place.topic}-{place.partition}")
    return bounds


def _committed(client: AdminClient, name: str) -> list[TopicPartition]:
    request = [ConsumerGroupTopicPartitions(name)]
    answer = kafka.only(client.list_consumer_group_offsets(request, request_timeout=kafka.TIMEOUT_S))
    return [place for place in answer.topic_partitions if place.offset >= 0]


def _lag_rows(address: str, committed: list[TopicPartition]) -> list[dict[str, Any]]:
    if not committed:
        return []
    reader = kafka.consumer(address, {"group.id": "stratalog-cli"})
    try:
        return [_lag_row(place, _bounds(reader, place)[1]) for place in sorted(committed)]
    finally:
        reader.close()


def _lag_row(place: TopicPartition, latest: int) -> dict[str, Any]:
    return {
        "topic": place.topic,
        "partition": place.partition,
        "committed_offset": place.offset,
        "latest_offset": latest,
        "lag": max(0, latest - place.offset),
    }
