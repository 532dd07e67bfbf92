"""Configs in force of topics and brokers, as rows for the responses that list them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stratalog_broker.admin.broker_configs import broker_configs
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_metadata.records import Topic, configs_in_force
from stratalog_metadata.topic_rules.config_keys import ConfigKey, ConfigKind, ConfigSource
from stratalog_metadata.topic_rules.topic_configs import TOPIC_CONFIG_KEYS, default_value


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSynonym:
    """A value at one level of precedence, and where it was set."""

    name: str
    value: str
    source: ConfigSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRow:
    """One config. ``synonyms`` are all its values in order of precedence; the first is in force."""

    name: str
    synonyms: tuple[ConfigSynonym, ...]
    kind: ConfigKind
    documentation: str
    read_only: bool = False

    @property
    def value(self) -> str:
        return self.synonyms[0].value

    @property
    def source(self) -> ConfigSource:
        return self.synonyms[0].source


def topic_config_rows(topic: Topic, defaults: Mapping[str, str]) -> list[ConfigRow]:
    """Return all configs of a topic, sorted by name. ``defaults`` are the cluster-wide defaults that were set."""
    rows, in_force = [], configs_in_force(topic, defaults)
    for name, key in TOPIC_CONFIG_KEYS.items():
        given = topic.configs.get(name)
        own = () if given is None else (ConfigSynonym(name=name, value=given, source=ConfigSource.TOPIC),)
        built_in = default_value(key, in_force, topic.replication_factor)
        others = _default_synonyms(key, {} if topic.internal else defaults, built_in)
        rows.append(ConfigRow(name=name, synonyms=(*own, *others), kind=key.kind, documentation=key.documentation))
    return rows


def default_config_rows(settings: BrokerSettings, defaults: Mapping[str, str]) -> list[ConfigRow]:
    """Return the cluster-wide defaults that were set, sorted by the names under which they are set."""
    return [row for row in _all_default_rows(settings, defaults) if row.source is ConfigSource.DYNAMIC_DEFAULT]


def broker_config_rows(settings: BrokerSettings, defaults: Mapping[str, str], store_url: str = "") -> list[ConfigRow]:
    """Return this broker's settings, which are read-only, and the defaults of topic configs, sorted by name.

    ``store_url``: where clients find the object store; without credentials.
    """
    rows = [
        ConfigRow(
            name=config.name, synonyms=tuple(ConfigSynonym(name=config.name, value=v, source=s) for v, s in config.values),
            kind=config.kind, documentation=config.documentation, read_only=True,
        )
        for config in broker_configs(settings, store_url)
    ]  # fmt: skip
    return sorted([*rows, *_all_default_rows(settings, defaults)], key=lambda row: row.name)


def _all_default_rows(settings: BrokerSettings, defaults: Mapping[str, str]) -> list[ConfigRow]:
    copies = settings.default_replication_factor
    rows = [
        ConfigRow(
            name=key.default_name, synonyms=_default_synonyms(key, defaults, default_value(key, defaults, copies)),
            kind=key.kind, read_only=key.is_per_topic,
            documentation=f"Default of the topic config {key.name}. {key.documentation}",
        )
        for key in TOPIC_CONFIG_KEYS.values()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row.name)


def _default_synonyms(key: ConfigKey, defaults: Mapping[str, str], built_in: str) -> tuple[ConfigSynonym, ...]:
    name, changed = key.default_name, defaults.get(key.name)
    last = ConfigSynonym(name=name, value=built_in, source=ConfigSource.DEFAULT)
    return (last,) if changed is None else (ConfigSynonym(name=name, value=changed, source=ConfigSource.DYNAMIC_DEFAULT), last)
