"""Effective configs of topics and brokers as rows, for the answers that list them."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_broker.broker_configs import BROKER_CONFIGS, text_of
from stratalog_broker.config import BrokerSettings
from stratalog_broker.config_keys import ConfigKind, ConfigSource
from stratalog_broker.topic_configs import TOPIC_CONFIG_KEYS, default_value
from stratalog_metadata.records import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRow:
    """One config: its value, where that comes from, and what would hold otherwise."""

    name: str
    value: str
    default: str
    source: ConfigSource
    kind: ConfigKind
    documentation: str
    read_only: bool


def topic_config_rows(topic: Topic) -> list[ConfigRow]:
    """All configs of a topic, sorted by name."""
    rows = []
    for name, key in TOPIC_CONFIG_KEYS.items():
        default = default_value(key, topic.configs, topic.replication_factor)
        given = topic.configs.get(name)
        source = ConfigSource.DEFAULT if given is None else ConfigSource.TOPIC
        rows.append(
            ConfigRow(
                name=name, value=default if given is None else given, default=default, source=source, kind=key.kind,
                documentation=key.documentation, read_only=False,
            )
        )  # fmt: skip
    return rows


def broker_config_rows(settings: BrokerSettings) -> list[ConfigRow]:
    """All configs of this broker, sorted by name."""
    rows = []
    for name, config in BROKER_CONFIGS.items():
        value = text_of(config.value(settings))
        source = ConfigSource.STATIC_BROKER if config.setting else ConfigSource.DEFAULT
        documentation = f"Broker setting {config.setting}." if config.setting else ""
        rows.append(
            ConfigRow(
                name=name, value=value, default=value, source=source, kind=config.kind, documentation=documentation,
                read_only=True,
            )
        )  # fmt: skip
    return rows
