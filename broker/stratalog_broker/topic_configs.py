"""Topic configuration: Kafka's names and types, our bounds and defaults, and the parsed form that the hot path reads.

Stored in ``Topic.configs`` is only what somebody set. Where defaults differ from Kafka's: ``segment.bytes`` and ``segment.ms``
are lower, because a segment is sealed before it goes to the object store; ``min.insync.replicas`` is the ack quorum, by
default a majority of the copies. Names whose Kafka meaning does not exist here (flushing,
index sizes, replication throttles …) are accepted and have no effect; unknown ones are refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_broker.config_keys import LONG_MAX, ConfigKey, ConfigKind, find_key, key_table
from stratalog_broker.partition import RollLimits
from stratalog_core.errors import Invalid
from stratalog_core.quorum import majority
from stratalog_metadata.records import Topic

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_MIB: Final = 1024 * 1024
ACK_QUORUM: Final = "stratalog.ack.quorum"
MIN_INSYNC: Final = "min.insync.replicas"
NO_EFFECT: Final = "Accepted for Kafka's tools; has no effect here."


def _number(
    kind: ConfigKind, name: str, default: int, documentation: str, minimum: int, maximum: int | None = None
) -> ConfigKey:
    return ConfigKey(
        name=name, kind=kind, default=str(default), documentation=documentation, minimum=minimum, maximum=maximum
    )  # fmt: skip


def _int(name: str, default: int, documentation: str, minimum: int = 0, maximum: int | None = None) -> ConfigKey:
    return _number(ConfigKind.INT, name, default, documentation, minimum, maximum)


def _long(name: str, default: int, documentation: str, minimum: int = 0, maximum: int | None = None) -> ConfigKey:
    return _number(ConfigKind.LONG, name, default, documentation, minimum, maximum)


def _flag(
    name: str, default: str, documentation: str, choices: tuple[str, ...] = ("true", "false"), reason: str = ""
) -> ConfigKey:
    return ConfigKey(
        name=name, kind=ConfigKind.BOOLEAN, default=default, documentation=documentation, choices=choices, reason=reason
    )


_SERVED: Final = (
    ConfigKey(
        name="cleanup.policy", kind=ConfigKind.LIST, default="delete", choices=("delete",),
        reason="compaction is not served yet", documentation="What happens to old segments: they are deleted.",
    ),
    ConfigKey(
        name="compression.type", kind=ConfigKind.STRING, default="producer",
        choices=("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
        documentation="Batches are always stored as the producer compressed them; other values are kept and have no effect.",
    ),
    ConfigKey(
        name="message.timestamp.type", kind=ConfigKind.STRING, default="CreateTime", choices=("CreateTime", "LogAppendTime"),
        documentation="Whether a record bears the producer's time or that of its arrival.",
    ),
    _long("local.retention.ms", -2, "How long verified cold data stays on bookies too; -2: as briefly as possible.", -2),
    ConfigKey(
        name="local.retention.bytes", kind=ConfigKind.LONG, default="-2", minimum=-2, maximum=-2,
        reason="a bound by size is not served yet, local.retention.ms bounds by time",
        documentation="How much verified cold data stays on bookies too; only -2, as little as possible, is served.",
    ),
    _int("max.message.bytes", 1_048_588, "Largest record batch, as compressed.", 0, 64 * _MIB),
    _long("message.timestamp.after.max.ms", _HOUR_MS, "How far ahead of arrival a record's time may be."),
    _long("message.timestamp.before.max.ms", LONG_MAX, "How far behind arrival a record's time may be."),
    _int(
        MIN_INSYNC, 1,
        "Copies on disk before acks=all is answered; never fewer than stratalog.ack.quorum, which is also the default. Above"
        " the replication factor acks=all is refused.", 1,
    ),
    ConfigKey(
        name="preferred.leader.rack", kind=ConfigKind.STRING, default="",
        documentation="Brokers in this rack (broker.rack) lead the topic's partitions while there are any; empty: any broker.",
    ),
    _flag(
        "remote.storage.enable", "true", "Sealed segments move to the object store.", ("true",),
        "every topic is tiered; set local.retention.ms to keep data on bookies too",
    ),
    _long("retention.bytes", -1, "Size of a partition, hot and cold, beyond which its oldest segments go; -1: none.", -1),
    _long("retention.ms", 7 * _DAY_MS, "Age beyond which segments go; -1: none.", -1),
    _int("segment.bytes", 256 * _MIB, "Size at which a ledger is sealed.", 64 * 1024),
    _long("segment.ms", _HOUR_MS, "Age at which a ledger is sealed.", 100),
    _int(
        ACK_QUORUM, 1,
        "Copies on disk before acks=all is answered; default: a majority of the replication factor. Fewer than that keep writes"
        " going with more bookies away, and risk acknowledged records: the loss of so few disks loses them.", 1, 15,
    ),
)  # fmt: skip

_WITHOUT_EFFECT: Final = (
    _long("delete.retention.ms", _DAY_MS, NO_EFFECT),
    _long("file.delete.delay.ms", 60_000, NO_EFFECT),
    _long("flush.messages", LONG_MAX, "Every acknowledged batch is on disk already. " + NO_EFFECT, 1),
    _long("flush.ms", LONG_MAX, "Every acknowledged batch is on disk already. " + NO_EFFECT),
    ConfigKey(name="follower.replication.throttled.replicas", kind=ConfigKind.LIST, default="", documentation=NO_EFFECT),
    _int("index.interval.bytes", 4_096, NO_EFFECT),
    ConfigKey(name="leader.replication.throttled.replicas", kind=ConfigKind.LIST, default="", documentation=NO_EFFECT),
    _long("max.compaction.lag.ms", LONG_MAX, NO_EFFECT, 1),
    ConfigKey(
        name="min.cleanable.dirty.ratio", kind=ConfigKind.DOUBLE, default="0.5", documentation=NO_EFFECT, minimum=0, maximum=1
    ),
    _long("min.compaction.lag.ms", 0, NO_EFFECT),
    _flag("preallocate", "false", NO_EFFECT),
    _flag("remote.log.copy.disable", "false", "Tiering is never off.", ("false",), "every topic is tiered"),
    _flag("remote.log.delete.on.disable", "false", NO_EFFECT),
    _int("segment.index.bytes", 10 * _MIB, NO_EFFECT, 4),
    _long("segment.jitter.ms", 0, NO_EFFECT),
    _flag("unclean.leader.election.enable", "false", "An acknowledged record is never given up. " + NO_EFFECT),
)

TOPIC_CONFIG_KEYS: Final = key_table((*_SERVED, *_WITHOUT_EFFECT))
_OF_INTERNAL_TOPICS: Final = frozenset({"cleanup.policy", MIN_INSYNC, "preferred.leader.rack", "segment.bytes", "segment.ms"})
"""What can be set for an internal topic. The rest has no effect on it: it is neither tiered nor subject to retention."""


def check_topic_configs(configs: Mapping[str, str], replication_factor: int, *, internal: bool = False) -> None:
    """Raises ``Invalid`` for an unknown name, a value out of bounds, or values that contradict each other."""
    if internal:
        _check_internal(configs, replication_factor)
        configs = {name: value for name, value in configs.items() if name != "cleanup.policy"}
    for name, value in configs.items():
        find_key(TOPIC_CONFIG_KEYS, name, "topic").check(value)
    quorum = int(configs.get(ACK_QUORUM, "1"))
    if quorum > replication_factor:
        raise Invalid(f"{ACK_QUORUM} is {quorum}; maximum is the replication factor, {replication_factor}")


def _check_internal(configs: Mapping[str, str], replication_factor: int) -> None:
    """An internal topic says "compact" to Kafka's tools, although its checkpoints do that, and stays as durable as it began."""
    foreign = sorted(configs.keys() - _OF_INTERNAL_TOPICS)
    if foreign:
        choices = ", ".join(sorted(_OF_INTERNAL_TOPICS))
        raise Invalid(f"{foreign[0]} cannot be set for an internal topic; choose of {choices}")
    policy = configs.get("cleanup.policy", "delete")
    if policy != "compact":
        raise Invalid(f"cleanup.policy={policy} of an internal topic; it has to be compact")
    quorum, least = configs.get(MIN_INSYNC, ""), majority(replication_factor)
    if quorum.isdecimal() and not least <= int(quorum) <= replication_factor:
        bounds = f"{least} to {replication_factor}" if least < replication_factor else f"{least}"
        raise Invalid(f"{MIN_INSYNC} is {quorum}; an internal topic with {replication_factor} copies takes {bounds}")


def default_value(key: ConfigKey, configs: Mapping[str, str], replication_factor: int) -> str:
    """What holds for a topic with ``configs`` that does not set ``key``."""
    if key.name == MIN_INSYNC and ACK_QUORUM in configs:
        return configs[ACK_QUORUM]
    return str(majority(replication_factor)) if key.name in (MIN_INSYNC, ACK_QUORUM) else key.default


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfigs:
    """The configs that the broker acts on, parsed. -1 in a retention means no limit."""

    local_retention_ms: int
    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    min_insync_replicas: int
    retention_bytes: int
    retention_ms: int
    segment_bytes: int
    segment_ms: int
    is_log_append_time: bool
    ack_quorum: int
    """Bookies that have a batch before acks=all is answered; never more than there are copies."""
    takes_acks_all: bool
    """False if ``min.insync.replicas`` asks for more copies than there are."""

    @classmethod
    def of(cls, topic: Topic) -> TopicConfigs:
        """Effective configs of a stored topic (cheap: topics with equal configs share one)."""
        return _parse(tuple(sorted(topic.configs.items())), topic.replication_factor)

    def roll_limits(self, idle_ms: int) -> RollLimits:
        """When the partition core ends a ledger."""
        return RollLimits(segment_bytes=self.segment_bytes, segment_ms=self.segment_ms, idle_ms=idle_ms)


_DERIVED: Final = frozenset({"is_log_append_time", "ack_quorum", "takes_acks_all"})
_NUMBERS: Final = tuple(
    field for field in TopicConfigs.__dataclass_fields__ if field not in _DERIVED
)  # field names are Kafka's with "_" for "."


@functools.lru_cache(maxsize=1024)
def _parse(configs: tuple[tuple[str, str], ...], replication_factor: int) -> TopicConfigs:
    given = dict(configs)

    def value(name: str) -> str:
        return given.get(name) or default_value(TOPIC_CONFIG_KEYS[name], given, replication_factor)

    numbers = {field: int(value(field.replace("_", "."))) for field in _NUMBERS}
    wanted = max(numbers["min_insync_replicas"], int(value(ACK_QUORUM)))
    return TopicConfigs(
        **numbers, is_log_append_time=value("message.timestamp.type") == "LogAppendTime",
        ack_quorum=min(wanted, replication_factor), takes_acks_all=wanted <= replication_factor,
    )  # fmt: skip
