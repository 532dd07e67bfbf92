"""``stratalog topic config``: shows and changes a topic's configs, and asks before a change that deletes records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ConfigSource, ResourceType

from stratalog import kafka
from stratalog.command_group import examples
from stratalog.config_values import config_values
from stratalog.deletion import yes_option
from stratalog.output import json_option, print_json, print_listing
from stratalog.parameters import valid_name
from stratalog.target import bootstrap_of, cluster_options, metadata_of, store_of, store_option
from stratalog.topic_retention import Expiring, change_of, confirm_compaction, confirm_shortening
from stratalog_broker.admin.retention_changes import RETENTION
from stratalog_metadata.topic_rules.cleanup_policy import CLEANUP_POLICY
from stratalog_metadata.topic_rules.topic_configs import TOPIC_CONFIG_KEYS

_DELETING = frozenset({*RETENTION, CLEANUP_POLICY})
"""The configs that say which records are deleted."""
_SOURCES = {ConfigSource.DYNAMIC_TOPIC_CONFIG: "topic", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG: "cluster"}


@click.command(
    epilog=examples(
        "stratalog topic config events",
        "stratalog topic config events --set retention.ms=604800000 --unset retention.bytes",
    )
)
@click.argument("name", callback=valid_name)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Set a config; repeatable.")
@click.option("--unset", multiple=True, callback=valid_name, metavar="NAME", help="Reset a config to its default; repeatable.")
@yes_option
@cluster_options
@store_option
@json_option
def config(
    name: str,
    changes: tuple[str, ...],
    unset: tuple[str, ...],
    yes: bool,
    data: Path | None,
    bootstrap: str | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Show or change a topic's configs.

    A shorter retention.ms or retention.bytes deletes records: the command says how many, and asks. Give the metadata nodes and
    the store, or --data, so that it can count them. It also asks before a new cleanup.policy starts to compact the topic.
    """
    client = kafka.admin(bootstrap_of(data, bootstrap))
    expiring: list[Expiring] = []
    if changes or unset:
        wanted = config_values(changes)
        before, after = _edited(client, name, wanted, unset)
        shorter = change_of(name, before, after)
        expiring = confirm_shortening(shorter, lambda: (metadata_of(data, metadata), store_of(data, store)), yes=yes)
        confirm_compaction(name, before, after, yes=yes)
        _alter(client, name, wanted, unset)
    entries = topic_configs(client, name)
    rows = [
        {"name": entry.name, "value": entry.value, "source": source_of(entry)}
        for entry in sorted(entries.values(), key=lambda entry: entry.name)
    ]
    if as_json and expiring:
        print_json({"configs": rows, "expiring": [dataclasses.asdict(each) for each in expiring]})
        return
    print_listing("configs", rows, ("name", "value", "source"), as_json=as_json)


def _edited(
    client: Any, name: str, changes: Mapping[str, str], unset: Sequence[str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the configs before and after, both empty unless one changes that says which records are deleted.

    Asks the brokers for the default of a config that is reset.
    """
    if not {*changes, *unset} & _DELETING:
        return {}, {}
    before = _values(topic_configs(client, name))
    after = {**before, **changes}
    if set(unset) & _DELETING:
        defaults = _values(_broker_configs(client))
        after |= {each: defaults[TOPIC_CONFIG_KEYS[each].default_name] for each in unset if each in _DELETING}
    return before, after


def _values(entries: Mapping[str, ConfigEntry]) -> dict[str, str]:
    return {name: entry.value for name, entry in entries.items() if entry.value is not None}


def _broker_configs(client: Any) -> dict[str, ConfigEntry]:
    broker = next(iter(kafka.listed(client.list_topics).brokers))
    resource = ConfigResource(ResourceType.BROKER, str(broker))
    entries: dict[str, ConfigEntry] = kafka.only(client.describe_configs([resource], request_timeout=kafka.TIMEOUT_S))
    return entries


def source_of(entry: ConfigEntry) -> str:
    """Return where a value was set: for the topic, for the whole cluster (`stratalog broker defaults`), or nowhere."""
    return _SOURCES.get(ConfigSource(entry.source), "built-in")


def _alter(client: Any, name: str, changes: dict[str, str], unset: tuple[str, ...]) -> None:
    entries = [
        ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET) for setting, value in changes.items()
    ] + [ConfigEntry(setting, None, incremental_operation=AlterConfigOpType.DELETE) for setting in unset]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
    kafka.only(client.incremental_alter_configs([resource], request_timeout=kafka.TIMEOUT_S))


def topic_configs(client: Any, name: str) -> dict[str, ConfigEntry]:
    """Return the configs in force of a topic by name. Raises ``NotFound``, ``Unavailable``."""
    resource = ConfigResource(ResourceType.TOPIC, name)
    entries: dict[str, ConfigEntry] = kafka.only(client.describe_configs([resource], request_timeout=kafka.TIMEOUT_S))
    return entries
