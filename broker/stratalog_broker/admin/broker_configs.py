"""All settings of a broker as DescribeConfigs returns them, under Kafka's names where Kafka has the setting.

They are read-only: settings are given when a broker starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stratalog_broker.configs.listeners import Listener, advertised_endpoints, parse_listeners
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_metadata.topic_rules.config_keys import ConfigKind, ConfigSource
from stratalog_tiering.store.store_url import STORE_URL_CONFIG

OWN_PREFIX: Final = "stratalog."
"""Prefix of settings that Kafka does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """One setting. ``values``: the value in force and, if it was set, the built-in default."""

    name: str
    kind: ConfigKind
    values: tuple[tuple[str, ConfigSource], ...]
    documentation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _KafkaName:
    name: str
    kind: ConfigKind | None = None
    convert: Callable[[Any], object] = lambda value: value


def _listeners(texts: Sequence[str]) -> str:
    return _written(parse_listeners(texts, "listen"))


def _written(listeners: Iterable[Listener]) -> str:
    return ",".join(f"{listener.name or 'PLAINTEXT'}://{listener.address}" for listener in listeners)


_KAFKA_NAMES: Final[Mapping[str, tuple[_KafkaName, ...]]] = {
    "broker_id": (_KafkaName(name="broker.id"), _KafkaName(name="node.id")),
    "listen": (_KafkaName(name="listeners", kind=ConfigKind.LIST, convert=_listeners),),
    "rack": (_KafkaName(name="broker.rack"),),
    "lease_ms": (_KafkaName(name="broker.session.timeout.ms"),),
    "auto_create_topics": (_KafkaName(name="auto.create.topics.enable"),),
    "default_partitions": (_KafkaName(name="num.partitions"),),
    "default_replication_factor": (_KafkaName(name="default.replication.factor"),),
    "offsets_topic_partitions": (_KafkaName(name="offsets.topic.num.partitions"),),
    "offsets_topic_replication_factor": (_KafkaName(name="offsets.topic.replication.factor", kind=ConfigKind.SHORT),),
    "transaction_state_log_num_partitions": (_KafkaName(name="transaction.state.log.num.partitions"),),
    "transaction_state_log_replication_factor": (
        _KafkaName(name="transaction.state.log.replication.factor", kind=ConfigKind.SHORT),
    ),
    "transaction_max_timeout_ms": (_KafkaName(name="transaction.max.timeout.ms"),),
    "transactional_id_expiration_ms": (_KafkaName(name="transactional.id.expiration.ms"),),
    "transaction_remove_expired_transaction_cleanup_interval_ms": (
        _KafkaName(name="transaction.remove.expired.transaction.cleanup.interval.ms"),
    ),
    "producer_id_expiration_ms": (_KafkaName(name="producer.id.expiration.ms"),),
    "offsets_retention_ms": (_KafkaName(name="offsets.retention.minutes", convert=lambda value: value // 60_000),),
    "frame_bytes_max": (_KafkaName(name="socket.request.max.bytes"),),
    "response_bytes_max": (_KafkaName(name="fetch.max.bytes"),),
    "connections_max": (_KafkaName(name="max.connections"),),
    "connection_idle_ms": (_KafkaName(name="connections.max.idle.ms", kind=ConfigKind.LONG),),
    "fetch_sessions_max": (_KafkaName(name="max.incremental.fetch.session.cache.slots"),),
    "group_session_timeout_min_ms": (_KafkaName(name="group.min.session.timeout.ms"),),
    "group_session_timeout_max_ms": (_KafkaName(name="group.max.session.timeout.ms"),),
    "group_initial_rebalance_delay_ms": (_KafkaName(name="group.initial.rebalance.delay.ms"),),
    "group_members_max": (_KafkaName(name="group.max.size"),),
    "group_consumer_session_timeout_ms": (_KafkaName(name="group.consumer.session.timeout.ms"),),
    "group_consumer_heartbeat_interval_ms": (_KafkaName(name="group.consumer.heartbeat.interval.ms"),),
    "group_consumer_members_max": (_KafkaName(name="group.consumer.max.size"),),
    "group_consumer_assignors": (
        _KafkaName(
            name="group.consumer.assignors",
        ),
    ),
    "group_consumer_migration_policy": (_KafkaName(name="group.consumer.migration.policy"),),
    "group_consumer_assignment_interval_ms": (_KafkaName(name="group.consumer.assignment.interval.ms"),),
}
_KINDS: Final = {"int": ConfigKind.LONG, "float": ConfigKind.DOUBLE, "bool": ConfigKind.BOOLEAN, "str": ConfigKind.STRING}
_ADVERTISED: Final = "advertised"
_ALWAYS: Final = ("delete.topic.enable", "remote.log.storage.system.enable")


def broker_configs(settings: BrokerSettings, store_url: str = "") -> Iterator[BrokerConfig]:
    """Yield all settings of a broker, Kafka's settings that have one fixed value here, and where the object store is."""
    yield _advertised_listeners(settings)
    for field in dataclasses.fields(settings):
        if field.name == _ADVERTISED:
            continue
        value = getattr(settings, field.name)
        is_set = value != field.default
        for known in _KAFKA_NAMES.get(field.name, (_KafkaName(name=OWN_PREFIX + field.name.replace("_", ".")),)):
            values = [(text_of(known.convert(value)), ConfigSource.STATIC_BROKER if is_set else ConfigSource.DEFAULT)]
            if is_set and field.default is not dataclasses.MISSING:
                values.append((text_of(known.convert(field.default)), ConfigSource.DEFAULT))
            yield BrokerConfig(
                name=known.name, kind=known.kind or _kind_of(field, known), values=tuple(values),
                documentation=f"[broker] {field.name}: {field.metadata['help']}.",
            )  # fmt: skip
    for name in _ALWAYS:
        yield BrokerConfig(
            name=name, kind=ConfigKind.BOOLEAN, values=(("true", ConfigSource.DEFAULT),), documentation="Always."
        )
    if store_url:
        yield BrokerConfig(
            name=STORE_URL_CONFIG, kind=ConfigKind.STRING, values=((store_url, ConfigSource.STATIC_BROKER),),
            documentation="Place, endpoint and region of [node] store, for clients that read it themselves; no credentials.",
        )  # fmt: skip


def _advertised_listeners(settings: BrokerSettings) -> BrokerConfig:
    """Return the address that clients of each listener get, whether it is set or the listener's own."""
    fields = {field.name: field for field in dataclasses.fields(settings)}
    is_set = bool(settings.advertised) or settings.listen != fields["listen"].default
    endpoints = advertised_endpoints(parse_listeners(settings.listen, "listen"), settings.advertised)
    value = _written(Listener(endpoint.listener, endpoint.host, endpoint.port) for endpoint in endpoints)
    return BrokerConfig(
        name="advertised.listeners", kind=ConfigKind.LIST,
        values=((value, ConfigSource.STATIC_BROKER if is_set else ConfigSource.DEFAULT),),
        documentation=f"[broker] {_ADVERTISED}: {fields[_ADVERTISED].metadata['help']}.",
    )  # fmt: skip


def _kind_of(field: dataclasses.Field[Any], known: _KafkaName) -> ConfigKind:
    is_own = known.name.startswith(OWN_PREFIX)
    return ConfigKind.INT if field.type == "int" and not is_own else _KINDS.get(str(field.type), ConfigKind.LIST)


def text_of(value: object) -> str:
    """Return a setting as Kafka's tools print it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
