"""Answers of DescribeConfigs for a topic, a broker, a group and a client metrics subscription, config by config.

Of configs that are not set, the built-in default is compared. Values from a broker's file of settings are left out: they
differ between the clusters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from confluent_kafka.admin import AdminClient, NewTopic
from unit.broker.raw_client import RawClient, request

from stratalog_metadata.topic_rules.topic_configs import TOPIC_CONFIGS_NOT_SERVED

_DESCRIBE, _VERSION = 32, 4
_ALTER, _ALTER_VERSION = 44, 1
_TIMEOUT_S: Final = 120


class Kind(IntEnum):
    """Resource types, by their numbers in the protocol."""

    TOPIC = 2
    BROKER = 4
    CLIENT_METRICS = 16
    GROUP = 32


_TYPES: Final = {
    0: "UNKNOWN", 1: "BOOLEAN", 2: "STRING", 3: "INT", 4: "SHORT", 5: "LONG", 6: "DOUBLE", 7: "LIST", 8: "CLASS", 9: "PASSWORD",
}  # fmt: skip
_SOURCES: Final = {
    1: "topic", 2: "dynamic broker", 3: "dynamic default", 4: "static broker", 5: "default", 6: "broker logger",
    7: "client metrics", 8: "group",
}  # fmt: skip
_STATIC, _DEFAULT = 4, 5
_OWN_NAMES: Final = ("stratalog.", "preferred.leader.rack")
_CONFIGS_OF_OTHER_GROUPS: Final = (
    "share.assignment.interval.ms", "share.auto.offset.reset", "share.delivery.count.limit", "share.heartbeat.interval.ms",
    "share.isolation.level", "share.partition.max.record.locks", "share.record.lock.duration.ms",
    "share.renew.acknowledge.enable", "share.session.timeout.ms", "streams.assignment.interval.ms",
    "streams.heartbeat.interval.ms", "streams.initial.rebalance.delay.ms", "streams.num.standby.replicas",
    "streams.session.timeout.ms",
)  # fmt: skip
SET: Final = {
    Kind.TOPIC: ("retention.ms", "7200000"),
    Kind.BROKER: ("log.roll.jitter.ms", "1234"),
    Kind.GROUP: ("consumer.session.timeout.ms", "50000"),
    Kind.CLIENT_METRICS: ("interval.ms", "1000"),
}
"""One config of each kind that is set, described and reset. That of the broker is the cluster's default."""

_AT_START: Final = "settings are fixed when a broker starts"
_BOUNDED: Final = "every limit has a finite default"
_DERIVED: Final = "Kafka derives the default from a config in hours, which does not exist here"
_FLUSHED: Final = "every batch is on disk before it is acknowledged"
_INDEXED: Final = "every batch is indexed"
_LISTED: Final = "the synonyms include the built-in default"
_OFFLOADED: Final = "shorter or smaller, because only sealed ledgers are offloaded; a copy stays on bookies for a minute"
_MAJORITY: Final = "the default is a majority of the copies"
_OBJECT_STORE: Final = "topics are offloaded unless they say otherwise"
_HAS_DEFAULT: Final = "the cluster can set a default"
_OTHER_GROUPS: Final = "share groups and streams groups are not served"
REASONS: Final[Mapping[str, str]] = {
    "BROKER broker.id": "a broker has no default id",
    "BROKER broker.rack": "no rack is described as an empty text",
    "BROKER broker.session.timeout.ms": "shorter, so that other brokers take over sooner",
    "BROKER fetch.max.bytes": "64 MiB instead of 55 MiB",
    "BROKER group.consumer.assignment.interval.ms": _AT_START,
    "BROKER group.consumer.max.size": _BOUNDED,
    "BROKER group.initial.rebalance.delay.ms": "shorter, so that groups start sooner",
    "BROKER group.max.size": _BOUNDED,
    "BROKER listeners": f"{_AT_START}; by default it listens on loopback",
    "BROKER log.flush.interval.messages": _FLUSHED,
    "BROKER log.flush.interval.ms": _FLUSHED,
    "BROKER log.index.interval.bytes": _INDEXED,
    "BROKER log.local.retention.ms": _OFFLOADED,
    "BROKER log.retention.ms": _DERIVED,
    "BROKER log.roll.jitter.ms": _DERIVED,
    "BROKER log.roll.jitter.ms, set": _DERIVED,
    "BROKER log.roll.ms": f"{_DERIVED}; {_OFFLOADED}",
    "BROKER log.segment.bytes": _OFFLOADED,
    "BROKER max.connections": f"{_BOUNDED}; {_AT_START}",
    "BROKER min.insync.replicas": _MAJORITY,
    "BROKER producer.id.expiration.ms": _AT_START,
    "BROKER remote.log.copy.disable": _HAS_DEFAULT,
    "BROKER remote.log.delete.on.disable": _HAS_DEFAULT,
    "BROKER remote.log.storage.system.enable": _OBJECT_STORE,
    "BROKER remote.storage.enable": _OBJECT_STORE,
    "CLIENT_METRICS interval.ms": _LISTED,
    "CLIENT_METRICS interval.ms, set": _LISTED,
    "CLIENT_METRICS match": _LISTED,
    "CLIENT_METRICS metrics": _LISTED,
    "TOPIC flush.messages": _FLUSHED,
    "TOPIC flush.ms": _FLUSHED,
    "TOPIC index.interval.bytes": _INDEXED,
    "TOPIC local.retention.ms": _OFFLOADED,
    "TOPIC min.insync.replicas": _MAJORITY,
    "TOPIC remote.log.copy.disable": _HAS_DEFAULT,
    "TOPIC remote.log.delete.on.disable": _HAS_DEFAULT,
    "TOPIC remote.storage.enable": f"{_OBJECT_STORE}; {_LISTED}",
    "TOPIC retention.ms": _DERIVED,
    "TOPIC retention.ms, set": _DERIVED,
    "TOPIC segment.bytes": _OFFLOADED,
    "TOPIC segment.jitter.ms": _DERIVED,
    "TOPIC segment.ms": f"{_DERIVED}; {_OFFLOADED}",
    **{f"TOPIC {name}": reason for name, reason in TOPIC_CONFIGS_NOT_SERVED.items()},
    **{f"GROUP {name}": _OTHER_GROUPS for name in _CONFIGS_OF_OTHER_GROUPS},
}
"""Why a config differs from Apache Kafka's, by its kind and name."""


def is_of_one_side(name: str, *, is_kafkas: bool) -> bool:
    """Whether a config that only one side has needs no reason: a broker's setting of Kafka, or what Kafka has no name for."""
    return name.startswith("BROKER ") if is_kafkas else name.split(" ", 1)[1].startswith(_OWN_NAMES)


def run_describes(bootstrap: str, suffix: str) -> dict[str, str]:
    """Describe a new topic, broker 1, and a group and a subscription without configs; then one that is set of each kind.

    Returns the fields of each config as text, by kind and name.
    """
    topic = f"described-{suffix}"
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=2)]).values():
        future.result(_TIMEOUT_S)
    broker = admin.list_topics(timeout=_TIMEOUT_S).brokers[1]
    names = {Kind.TOPIC: topic, Kind.BROKER: "1", Kind.GROUP: topic, Kind.CLIENT_METRICS: topic}
    return asyncio.run(_run(f"{broker.host}:{broker.port}", names))


async def _run(address: str, names: dict[Kind, str]) -> dict[str, str]:
    client = await RawClient.connect(address)
    try:
        found = {
            f"{kind.name} {config.name}": _default_text(config)
            for kind, name in names.items()
            for config in await _described(client, kind, name)
        }
        for kind, (config_name, value) in SET.items():
            altered = "" if kind is Kind.BROKER else names[kind]
            await _alter(client, kind, altered, config_name, value)
            try:
                found[f"{kind.name} {config_name}, set"] = await _set_text(client, kind, names[kind], config_name, value)
            finally:
                await _alter(client, kind, altered, config_name, None)
        return found
    finally:
        await client.close()


async def _described(client: RawClient, kind: Kind, name: str) -> Any:
    """Return the configs of a resource, once the broker knows it: another one may have created the topic."""
    resource = request(
        _DESCRIBE, _VERSION, "DescribeConfigsResource", resource_type=kind, resource_name=name, configuration_keys=None
    )
    wanted = request(
        _DESCRIBE, _VERSION, "DescribeConfigsRequest", resources=(resource,), include_synonyms=True,
        include_documentation=False,
    )  # fmt: skip
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        (result,) = (await client.call(_DESCRIBE, _VERSION, wanted)).results
        if result.error_code.value == 0:
            return result.configs
        assert time.monotonic() < deadline, result.error_message
        await asyncio.sleep(0.1)


async def _set_text(client: RawClient, kind: Kind, name: str, config_name: str, value: str) -> str:
    """Wait until the broker has seen the change; return the fields of the config."""
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            (config,) = [one for one in await _described(client, kind, name) if one.name == config_name]
            if config.value == value:
                return _text(config, f"= {config.value} of {_SOURCES[config.config_source]}", config.synonyms)
            await asyncio.sleep(0.1)


async def _alter(client: RawClient, kind: Kind, name: str, config_name: str, value: str | None) -> None:
    config = request(
        _ALTER, _ALTER_VERSION, "AlterableConfig", name=config_name, config_operation=int(value is None), value=value
    )
    resource = request(
        _ALTER, _ALTER_VERSION, "AlterConfigsResource", resource_type=kind, resource_name=name, configs=(config,)
    )
    answer = await client.call(
        _ALTER, _ALTER_VERSION,
        request(_ALTER, _ALTER_VERSION, "IncrementalAlterConfigsRequest", resources=(resource,), validate_only=False),
    )  # fmt: skip
    (result,) = answer.responses
    assert result.error_code.value == 0, result.error_message


def _default_text(config: Any) -> str:
    defaults = [one.value for one in config.synonyms if one.source == _DEFAULT]
    if config.config_source == _DEFAULT:
        defaults.append(config.value)
    value = f"default {'none' if not defaults or defaults[-1] is None else repr(defaults[-1])}"
    return _text(config, value, [one for one in config.synonyms if one.source != _STATIC])


def _text(config: Any, value: str, synonyms: Sequence[Any]) -> str:
    flags = [text for text, holds in (("read-only", config.read_only), ("sensitive", config.is_sensitive)) if holds]
    names = [f"{one.name} ({_SOURCES[one.source]})" for one in synonyms]
    return ", ".join([_TYPES[config.config_type], *flags, value, "synonyms " + (" ".join(names) or "none")])
