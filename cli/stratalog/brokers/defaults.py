"""Cluster-wide defaults of topic configs, changed by the same metadata command that a broker makes for Kafka's tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from stratalog.brokers.report import Row
from stratalog_broker.admin.topic_defaults import configure_defaults
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.topic_rules.topic_configs import TOPIC_CONFIG_KEYS, default_text, topic_config_name

_TIMEOUT_S = 10.0


async def change_defaults(metadata: MetadataClient, changes: Mapping[str, str], unset: Iterable[str]) -> None:
    """Set and remove defaults in one command. Raises ``Invalid`` for an unsupported name or value."""
    await configure_defaults(metadata, partial(edited, changes, list(unset)), _TIMEOUT_S, validate_only=False)


def edited(changes: Mapping[str, str], unset: Iterable[str], before: Mapping[str, str]) -> Mapping[str, str]:
    """The defaults after the changes, under the topic configs' names. Raises ``Invalid`` for an unsupported name."""
    gone = {topic_config_name(name) for name in unset}
    new = {topic_config_name(name): value for name, value in changes.items()}
    return {**{name: value for name, value in before.items() if name not in gone}, **new}


def default_rows(view: MetadataView) -> list[Row]:
    """Return one row per topic config with the default in force."""
    changed = topic_defaults(view)
    return [
        {
            "config": name, "broker_name": key.default_name, "value": changed.get(name, default_text(key)),
            "built_in": default_text(key), "changed": name in changed,
        }
        for name, key in TOPIC_CONFIG_KEYS.items()
    ]  # fmt: skip
