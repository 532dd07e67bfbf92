"""Broker configuration as DescribeConfigs shows it: this broker's settings under the names that Kafka's tools look for.

All of it is read-only: settings are given when a broker starts. Topic defaults appear under Kafka's broker-level names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_broker.config import BrokerSettings
from stratalog_broker.config_keys import ConfigKind
from stratalog_broker.listeners import parse_listeners
from stratalog_broker.topic_configs import TOPIC_CONFIG_KEYS

Value = Callable[[BrokerSettings], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """One name; ``setting`` is the field of ``BrokerSettings`` behind it ("": fixed)."""

    name: str
    kind: ConfigKind
    value: Value
    setting: str = ""


def _from(setting: str, name: str, kind: ConfigKind = ConfigKind.INT) -> BrokerConfig:
    return BrokerConfig(name=name, kind=kind, setting=setting, value=lambda settings: getattr(settings, setting))


def _fixed(name: str, value: object, kind: ConfigKind) -> BrokerConfig:
    return BrokerConfig(name=name, kind=kind, value=lambda _: value)


def _topic_default(name: str, topic_name: str) -> BrokerConfig:
    key = TOPIC_CONFIG_KEYS[topic_name]
    return _fixed(name, key.default, key.kind)


def _listeners(settings: BrokerSettings) -> str:
    listeners = parse_listeners(settings.listen, "listen")
    return ",".join(f"{listener.name or 'PLAINTEXT'}://{listener.address}" for listener in listeners)


_CONFIGS: Final = (
    _from("broker_id", "broker.id"),
    _from("broker_id", "node.id"),
    BrokerConfig(name="listeners", kind=ConfigKind.LIST, value=_listeners, setting="listen"),
    _from("rack", "broker.rack", ConfigKind.STRING),
    _from("lease_ms", "broker.session.timeout.ms"),
    _from("auto_create_topics", "auto.create.topics.enable", ConfigKind.BOOLEAN),
    _from("default_partitions", "num.partitions"),
    _from("default_replication_factor", "default.replication.factor"),
    _from("offsets_topic_partitions", "offsets.topic.num.partitions"),
    _from("offsets_topic_replication_factor", "offsets.topic.replication.factor"),
    BrokerConfig(
        name="offsets.retention.minutes", kind=ConfigKind.INT, setting="offsets_retention_ms",
        value=lambda settings: settings.offsets_retention_ms // 60_000,
    ),
    _from("frame_bytes_max", "socket.request.max.bytes"),
    _from("response_bytes_max", "fetch.max.bytes"),
    _from("connections_max", "max.connections"),
    _from("connection_idle_ms", "connections.max.idle.ms", ConfigKind.LONG),
    _from("fetch_sessions_max", "max.incremental.fetch.session.cache.slots"),
    _from("group_session_timeout_min_ms", "group.min.session.timeout.ms"),
    _from("group_session_timeout_max_ms", "group.max.session.timeout.ms"),
    _from("group_initial_rebalance_delay_ms", "group.initial.rebalance.delay.ms"),
    _from("group_members_max", "group.max.size"),
    _fixed("delete.topic.enable", True, ConfigKind.BOOLEAN),
    _fixed("remote.log.storage.system.enable", True, ConfigKind.BOOLEAN),
    _topic_default("compression.type", "compression.type"),
    _topic_default("log.cleanup.policy", "cleanup.policy"),
    _topic_default("log.message.timestamp.type", "message.timestamp.type"),
    _topic_default("log.retention.bytes", "retention.bytes"),
    _topic_default("log.retention.ms", "retention.ms"),
    _topic_default("log.roll.ms", "segment.ms"),
    _topic_default("log.segment.bytes", "segment.bytes"),
    _topic_default("message.max.bytes", "max.message.bytes"),
    _topic_default("min.insync.replicas", "min.insync.replicas"),
)  # fmt: skip

BROKER_CONFIGS: Final[Mapping[str, BrokerConfig]] = {
    config.name: config for config in sorted(_CONFIGS, key=lambda config: config.name)
}


def text_of(value: object) -> str:
    """A setting as Kafka's tools print it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
