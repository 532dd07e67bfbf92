"""``stratalog topic …``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, OffsetSpec, ResourceType

from stratalog import kafka
from stratalog.output import json_option, print_json, print_listing, print_rows
from stratalog.target import bootstrap_of, kafka_options
from stratalog_core.errors import Invalid


@click.group()
def topic() -> None:
    """Create, list, describe, delete and configure topics."""


@topic.command()
@click.argument("name")
@click.option("--partitions", default=1, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--replication-factor", default=-1, help="Copies of each record (default: the cluster's).")
@click.option("--config", "configs", multiple=True, metavar="NAME=VALUE", help="Topic setting under Kafka's name; repeatable.")
@kafka_options
def create(
    name: str, partitions: int, replication_factor: int, configs: tuple[str, ...], data: Path | None, bootstrap: str | None
) -> None:
    """Create a topic."""
    client = kafka.admin(bootstrap_of(data, bootstrap))
    new = NewTopic(name, num_partitions=partitions, replication_factor=replication_factor, config=_settings(configs))
    kafka.only(client.create_topics([new], request_timeout=kafka.TIMEOUT_S))
    click.echo(f"created {name} with {partitions} partition{'s' if partitions > 1 else ''}", err=True)


@topic.command("list")
@click.option("--internal", is_flag=True, help="Show internal topics, too.")
@kafka_options
@json_option
def list_topics(internal: bool, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """List topics."""
    with kafka.translated():
        topics = kafka.admin(bootstrap_of(data, bootstrap)).list_topics(timeout=kafka.TIMEOUT_S).topics
    rows = [
        {"name": name, "partitions": len(found.partitions)}
        for name, found in sorted(topics.items())
        if internal or not name.startswith("__")
    ]
    print_listing("topics", rows, ("name", "partitions"), as_json=as_json)


@topic.command()
@click.argument("name")
@kafka_options
@json_option
def describe(name: str, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """Show a topic's partitions, offsets and settings."""
    servers = bootstrap_of(data, bootstrap)
    client = kafka.admin(servers)
    rows = _partition_rows(client, servers, name)
    resource = ConfigResource(ResourceType.TOPIC, name)
    entries = kafka.only(client.describe_configs([resource], request_timeout=kafka.TIMEOUT_S))
    changed = {entry.name: entry.value for entry in entries.values() if not entry.is_default}
    if as_json:
        everything = {entry.name: entry.value for entry in entries.values()}
        print_json({"name": name, "partitions": rows, "configs": everything, "changed_configs": changed})
        return
    print_rows(rows, ("partition", "leader", "earliest_offset", "latest_offset", "records"), title=name)
    for setting, value in sorted(changed.items()):
        click.echo(f"{setting} = {value}")


def _partition_rows(client: Any, servers: str, name: str) -> list[dict[str, Any]]:
    partitions = kafka.partitions_of(client.list_topics, name)
    with kafka.translated():
        found = client.list_topics(timeout=kafka.TIMEOUT_S).topics[name].partitions
    earliest = _offsets(servers, name, partitions, OffsetSpec.earliest())
    latest = _offsets(servers, name, partitions, OffsetSpec.latest())
    return [
        {
            "partition": partition,
            "leader": found[partition].leader,
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
@click.argument("names", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@kafka_options
def delete(names: tuple[str, ...], yes: bool, data: Path | None, bootstrap: str | None) -> None:
    """Delete topics, their history in the object store included."""
    if not yes:
        click.confirm(f"Delete {', '.join(names)} and all their records?", abort=True, err=True)
    client = kafka.admin(bootstrap_of(data, bootstrap))
    for name, future in client.delete_topics(list(names), request_timeout=kafka.TIMEOUT_S).items():
        kafka.only({name: future})
        click.echo(f"deleted {name}", err=True)


@topic.command()
@click.argument("name")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a setting; repeatable.")
@click.option("--unset", multiple=True, metavar="NAME", help="Return a setting to its default; repeatable.")
@kafka_options
@json_option
def config(
    name: str, changes: tuple[str, ...], unset: tuple[str, ...], data: Path | None, bootstrap: str | None, as_json: bool
) -> None:
    """Show a topic's settings, or change them."""
    client = kafka.admin(bootstrap_of(data, bootstrap))
    if changes or unset:
        _alter(client, name, _settings(changes), unset)
    entries = kafka.only(client.describe_configs([ConfigResource(ResourceType.TOPIC, name)], request_timeout=kafka.TIMEOUT_S))
    rows = [
        {"name": entry.name, "value": entry.value, "default": entry.is_default}
        for entry in sorted(entries.values(), key=lambda entry: entry.name)
    ]
    print_listing("configs", rows, ("name", "value", "default"), as_json=as_json)


def _alter(client: Any, name: str, changes: dict[str, str], unset: tuple[str, ...]) -> None:
    entries = [
        ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET) for setting, value in changes.items()
    ] + [ConfigEntry(setting, None, incremental_operation=AlterConfigOpType.DELETE) for setting in unset]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
    kafka.only(client.incremental_alter_configs([resource], request_timeout=kafka.TIMEOUT_S))


def _settings(texts: tuple[str, ...]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise Invalid(f"{text!r} is not NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)
