"""Topic configs: Kafka's names and types, Stratalog's bounds and defaults, and the parsed form that the hot path reads.

A listed config either has an effect or has one fixed value, which it describes. Kafka's other names are refused with the
reason. ``Topic.configs`` stores only values that were set. Defaults that differ from Kafka's: ``segment.bytes`` and
``segment.ms`` are lower, because a ledger is sealed before it is offloaded; ``min.insync.replicas`` is the ack quorum, by
default a majority of the copies.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.recompression import Codec
from stratalog_core.batches.record_search import RecordRules
from stratalog_core.errors import Invalid
from stratalog_core.ports import Random
from stratalog_core.quorum import majority
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Topic, configs_in_force
from stratalog_metadata.topic_rules.cleanup_policy import CLEANUP_POLICY, COMPACT, DELETE, cleanup_policies
from stratalog_metadata.topic_rules.config_keys import LONG_MAX, ConfigKey, ConfigKind, find_key, key_table
from stratalog_metadata.topic_rules.fixed_topic_configs import FIXED_TOPIC_CONFIGS
from stratalog_metadata.topic_rules.tier_topic_configs import LOCK_MODE, LOCK_MS, NO_LOCK, TIER_TOPIC_CONFIGS

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_MIB: Final = 1024 * 1024
ACK_QUORUM: Final = "stratalog.ack.quorum"
MIN_INSYNC: Final = "min.insync.replicas"
STORAGE_ENABLE: Final = "remote.storage.enable"
MAX_COMPACTION_LAG_MS: Final = "max.compaction.lag.ms"
MIN_COMPACTION_LAG_MS: Final = "min.compaction.lag.ms"
LOCAL_RETENTION_MS: Final = "local.retention.ms"
LOCAL_RETENTION_BYTES: Final = "local.retention.bytes"
COMPRESSION_TYPE: Final = "compression.type"
_PRODUCER: Final = "producer"
_LIKE_RETENTION: Final = -2
_UNLIMITED: Final = -1
_LOCK_MS_MIN: Final = 10_000
"""An upload, and the commit of what it made, should end before its lock."""
_NO_DEFAULTS: Final[Mapping[str, str]] = {}


def _int(
    name: str, default: int, documentation: str, minimum: int = 0, maximum: int | None = None, broker_name: str = ""
) -> ConfigKey:
    return ConfigKey(
        name=name, kind=ConfigKind.INT, default=str(default), documentation=documentation, minimum=minimum, maximum=maximum,
        broker_name=broker_name,
    )  # fmt: skip


def _long(name: str, default: int, documentation: str, minimum: int = 0, broker_name: str = "") -> ConfigKey:
    return ConfigKey(
        name=name, kind=ConfigKind.LONG, default=str(default), documentation=documentation, minimum=minimum,
        broker_name=broker_name,
    )  # fmt: skip


def _double(name: str, default: float, documentation: str, maximum: int, broker_name: str) -> ConfigKey:
    return ConfigKey(
        name=name, kind=ConfigKind.DOUBLE, default=str(default), documentation=documentation, minimum=0, maximum=maximum,
        broker_name=broker_name,
    )  # fmt: skip


_WITH_EFFECT: Final = (
    ConfigKey(
        name=CLEANUP_POLICY, kind=ConfigKind.LIST, default=DELETE, choices=(COMPACT, DELETE),
        documentation="delete: segments are deleted by retention.ms and retention.bytes. compact: the cold history keeps the"
        " newest record of each key; records need keys. Both: it keeps it for that time. Empty: everything is kept.",
        broker_name="log.cleanup.policy",
    ),
    ConfigKey(
        name=COMPRESSION_TYPE, kind=ConfigKind.STRING, default=_PRODUCER,
        choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", _PRODUCER),
        documentation="Codec of stored batches. producer: they are stored as they come. Else the broker rewrites those"
        " that have another codec, at a cost in processor time and latency.",
    ),
    ConfigKey(
        name="compression.gzip.level", kind=ConfigKind.INT, default="-1", choices=("-1", *map(str, range(1, 10))),
        documentation="Level of gzip if compression.type is gzip, 1 to 9; -1: zlib's default.",
    ),
    _int("compression.lz4.level", 9, "Level of lz4 if compression.type is lz4. Not set: lz4's fast mode.", 1, 17),
    _int("compression.zstd.level", 3, "Level of zstd if compression.type is zstd.", -131_072, 22),
    _long(
        "delete.retention.ms", _DAY_MS,
        "How long a compacted topic keeps a tombstone after the first compaction that finds it.",
        broker_name="log.cleaner.delete.retention.ms",
    ),
    _long(
        MAX_COMPACTION_LAG_MS, LONG_MAX,
        "Age of the oldest record that was not compacted at which a compaction begins however little is dirty. Ledgers are"
        " sealed at this age, too.", 1, "log.cleaner.max.compaction.lag.ms",
    ),
    _double(
        "min.cleanable.dirty.ratio", 0.5, "Share of bytes that are not compacted yet above which a compaction begins.",
        1, "log.cleaner.min.cleanable.ratio",
    ),
    _long(
        MIN_COMPACTION_LAG_MS, 0, "Age below which a record is not compacted.",
        broker_name="log.cleaner.min.compaction.lag.ms",
    ),
    ConfigKey(
        name="message.timestamp.type", kind=ConfigKind.STRING, default="CreateTime", choices=("CreateTime", "LogAppendTime"),
        documentation="Whether a record's timestamp is the producer's time or the time of its arrival.",
        broker_name="log.message.timestamp.type",
    ),
    _long(
        LOCAL_RETENTION_BYTES, -2,
        "Size of a partition's hot ledgers above which the oldest one that is also cold, verified, leaves the bookies;"
        " -2: retention.bytes; -1: no limit.", -2, "log.local.retention.bytes",
    ),
    _long(
        LOCAL_RETENTION_MS, 60_000,
        "Age at which a sealed ledger that is also cold, verified, leaves the bookies; 0: at once; -2: retention.ms; -1: never."
        " It leaves earlier if a bookie that has a copy is low on space ([bookie] free_bytes_low)."
        " Not set: [tiering] deletion_lag_ms after it became cold, or retention.ms if local.retention.bytes is set.", -2,
        "log.local.retention.ms",
    ),
    _int("max.message.bytes", 1_048_588, "Maximum size of a record batch, as compressed.", 0, 64 * _MIB, "message.max.bytes"),
    _long(
        "message.timestamp.after.max.ms", _HOUR_MS, "How far a record's timestamp may be ahead of its arrival.",
        broker_name="log.message.timestamp.after.max.ms",
    ),
    _long(
        "message.timestamp.before.max.ms", LONG_MAX, "How far a record's timestamp may be behind its arrival.",
        broker_name="log.message.timestamp.before.max.ms",
    ),
    _int(
        MIN_INSYNC, 1,
        "Copies on disk before acks=all is answered; at least stratalog.ack.quorum, which is also the default. If it exceeds"
        " the replication factor, acks=all is refused.", 1,
    ),
    ConfigKey(
        name="preferred.leader.rack", kind=ConfigKind.STRING, default="",
        documentation="Brokers in this rack (broker.rack) lead the topic's partitions while there are any; empty: any broker.",
    ),
    ConfigKey(
        name="remote.log.copy.disable", kind=ConfigKind.BOOLEAN, default="false", choices=("true", "false"),
        documentation="true: no more sealed ledgers move to the object store until it is false again. What is hot only stays"
        " until retention.ms or retention.bytes removes it.",
    ),
    ConfigKey(
        name=STORAGE_ENABLE, kind=ConfigKind.BOOLEAN, default="true", choices=("true", "false"), is_per_topic=True,
        documentation="false: the topic stays on bookies and is never offloaded. Refused if the topic has records in the object"
        " store.",
    ),
    _long(
        "retention.bytes", -1, "Size of a partition, hot and cold, above which old segments are deleted; -1: none.", -1,
        "log.retention.bytes",
    ),
    _long("retention.ms", 7 * _DAY_MS, "Age at which segments are deleted; -1: never.", -1, "log.retention.ms"),
    _int(
        "segment.bytes", 256 * _MIB,
        "Size at which a ledger is sealed. In internal topics it is at most 8 MiB, or the size of the checkpoint if that is"
        " larger.", 64 * 1024, broker_name="log.segment.bytes",
    ),
    _long(
        "segment.jitter.ms", 0, "Maximum random time before segment.ms at which a ledger is sealed, to spread sealing.",
        broker_name="log.roll.jitter.ms",
    ),
    _long("segment.ms", _HOUR_MS, "Age at which a ledger is sealed.", 100, "log.roll.ms"),
    _int(
        ACK_QUORUM, 1,
        "Copies on disk before acks=all is answered; default: a majority of the replication factor. A smaller number keeps"
        " writes going with more bookies down, but acknowledged records are lost if that number of disks is lost.", 1, 15,
    ),
    ConfigKey(
        name="stratalog.deletion.protection", kind=ConfigKind.BOOLEAN, default="false", choices=("true", "false"),
        documentation="true: DeleteTopics and DeleteRecords are refused with POLICY_VIOLATION. Retention goes on.",
    ),
)  # fmt: skip

TOPIC_CONFIG_KEYS: Final = key_table((*_WITH_EFFECT, *TIER_TOPIC_CONFIGS, *FIXED_TOPIC_CONFIGS))

_THROTTLE: Final = "ownership moves without copying, so there is nothing to throttle"
TOPIC_CONFIGS_NOT_SERVED: Final[Mapping[str, str]] = {
    "file.delete.delay.ms": "[tiering] deletion_lag_ms and grace_ms control when data is deleted",
    "follower.replication.throttled.replicas": _THROTTLE,
    "leader.replication.throttled.replicas": _THROTTLE,
    "segment.index.bytes": "indexes grow with their ledger; [broker] memory_bytes bounds their memory",
}
"""Kafka's topic configs that do not apply to Stratalog, with the reason."""

_BY_DEFAULT_NAME: Final = {key.default_name: key for key in TOPIC_CONFIG_KEYS.values()}
_OF_INTERNAL_TOPICS: Final = frozenset({"cleanup.policy", MIN_INSYNC, "preferred.leader.rack", "segment.bytes", "segment.ms"})
"""Configs that can be set for an internal topic. Others have no effect: it is neither tiered nor subject to retention."""


def topic_config_key(name: str) -> ConfigKey:
    """Return the config of this name. Raises ``Invalid`` with the reason, or the nearest known name, if it is not served."""
    reason = TOPIC_CONFIGS_NOT_SERVED.get(name)
    if reason is not None:
        raise Invalid(f"topic config {name} is not supported: {reason}; leave it out")
    return find_key(TOPIC_CONFIG_KEYS, name, "topic")


def topic_config_name(name: str) -> str:
    """Return the topic config whose cluster-wide default has this name in Kafka; any other name unchanged."""
    key = _BY_DEFAULT_NAME.get(name)
    return name if key is None else key.name


def check_topic_configs(
    configs: Mapping[str, str],
    replication_factor: int,
    *,
    internal: bool = False,
    defaults: Mapping[str, str] = _NO_DEFAULTS,
) -> None:
    """Raise ``Invalid`` for an unknown name, a value out of bounds, or values that contradict each other or ``defaults``."""
    if internal:
        _check_internal(configs, replication_factor)
        configs = {name: value for name, value in configs.items() if name != "cleanup.policy"}
    for name, value in configs.items():
        topic_config_key(name).check(value)
    quorum = int(configs.get(ACK_QUORUM, "1"))
    if quorum > replication_factor:
        raise Invalid(f"{ACK_QUORUM} is {quorum}; maximum is the replication factor, {replication_factor}")
    _check_local_retention(configs, defaults)
    if not internal:
        check_lock({**defaults, **configs})
        check_compaction({**defaults, **configs})


def check_topic_defaults(configs: Mapping[str, str]) -> None:
    """Raise ``Invalid`` as :func:`check_topic_configs` does, for cluster-wide defaults."""
    for name, value in configs.items():
        key = topic_config_key(name)
        if key.is_per_topic:
            raise Invalid(f"{name} has no cluster-wide default; set it for each topic")
        key.check(value)
    _check_local_retention(configs, _NO_DEFAULTS)
    check_lock(configs)
    check_compaction(configs)


def check_compaction(configs: Mapping[str, str]) -> None:
    """Raise ``Invalid`` if the ``configs`` in force contradict each other (as Kafka does), or compact what must not change."""
    least, most = int(_value(configs, MIN_COMPACTION_LAG_MS)), int(_value(configs, MAX_COMPACTION_LAG_MS))
    if least > most:
        raise Invalid(f"{MIN_COMPACTION_LAG_MS} is {least}; maximum is {MAX_COMPACTION_LAG_MS}, {most}")
    if COMPACT not in cleanup_policies(configs):
        return
    if configs.get(STORAGE_ENABLE, "true").lower() == "false":
        raise Invalid(
            f"{CLEANUP_POLICY}={COMPACT} needs the object store; set {STORAGE_ENABLE}=true, or {CLEANUP_POLICY}={DELETE}"
        )
    if configs.get(LOCK_MODE, NO_LOCK) != NO_LOCK:
        raise Invalid(f"{CLEANUP_POLICY}={COMPACT} removes records, which {LOCK_MODE} forbids; leave one of them out")


def check_lock(configs: Mapping[str, str]) -> None:
    """Raise ``Invalid`` if the ``configs`` in force lock segments for no time, or longer than they are to be kept."""
    if configs.get(LOCK_MODE, NO_LOCK) == NO_LOCK:
        return
    lock_ms, retention_ms = int(configs.get(LOCK_MS, "0")), int(_value(configs, "retention.ms"))
    if lock_ms < _LOCK_MS_MIN:
        raise Invalid(f"{LOCK_MS} is {lock_ms}; with a {LOCK_MODE} the minimum is {_LOCK_MS_MIN}")
    if retention_ms != _UNLIMITED and lock_ms > retention_ms:
        raise Invalid(
            f"{LOCK_MS} is {lock_ms}; maximum is retention.ms, {retention_ms}: lower {LOCK_MS}, or keep records longer with a"
            " higher retention.ms"
        )
    if configs.get(STORAGE_ENABLE, "true").lower() == "false":
        raise Invalid(f"{LOCK_MODE} needs the object store; set {STORAGE_ENABLE}=true, or {LOCK_MODE}={NO_LOCK}")


def _value(configs: Mapping[str, str], name: str) -> str:
    return configs.get(name) or TOPIC_CONFIG_KEYS[name].default


def _check_local_retention(configs: Mapping[str, str], defaults: Mapping[str, str]) -> None:
    """Raise ``Invalid`` if hot copies would have to stay longer than the records, as Kafka does (KIP-405)."""
    for local_name, name in ((LOCAL_RETENTION_MS, "retention.ms"), (LOCAL_RETENTION_BYTES, "retention.bytes")):
        local = int(configs.get(local_name, _LIKE_RETENTION))
        total = int(configs.get(name) or defaults.get(name) or TOPIC_CONFIG_KEYS[name].default)
        if local != _LIKE_RETENTION and total != _UNLIMITED and not 0 <= local <= total:
            raise Invalid(f"{local_name} is {local}; maximum is {name}, {total}; lower it, or raise {name}")


def _check_internal(configs: Mapping[str, str], replication_factor: int) -> None:
    """Raise ``Invalid`` unless the configs suit an internal topic: ``compact`` for Kafka's tools, and a majority of copies."""
    foreign = sorted(configs.keys() - _OF_INTERNAL_TOPICS)
    if foreign:
        choices = ", ".join(sorted(_OF_INTERNAL_TOPICS))
        raise Invalid(f"{foreign[0]} cannot be set for an internal topic; choose one of {choices}")
    policy = configs.get("cleanup.policy", "delete")
    if policy != "compact":
        raise Invalid(f"cleanup.policy is {policy}; an internal topic requires compact")
    quorum, least = configs.get(MIN_INSYNC, ""), majority(replication_factor)
    if quorum.isdecimal() and not least <= int(quorum) <= replication_factor:
        bounds = f"{least} to {replication_factor}" if least < replication_factor else f"{least}"
        raise Invalid(f"{MIN_INSYNC} is {quorum}; an internal topic with {replication_factor} copies requires {bounds}")


def default_value(key: ConfigKey, configs: Mapping[str, str], replication_factor: int) -> str:
    """Return the value of ``key`` for a topic whose ``configs`` in force do not set it."""
    if key.name == MIN_INSYNC and ACK_QUORUM in configs:
        return configs[ACK_QUORUM]
    if key.name == LOCAL_RETENTION_MS and LOCAL_RETENTION_BYTES in configs:
        return str(_LIKE_RETENTION)
    return str(majority(replication_factor)) if key.name in (MIN_INSYNC, ACK_QUORUM) else key.default


def default_text(key: ConfigKey) -> str:
    """Return the built-in default as text for display."""
    return "a majority of the copies" if key.name in (MIN_INSYNC, ACK_QUORUM) else key.default


@dataclass(frozen=True, slots=True, kw_only=True)
class RollLimits:
    """Limits at which the open ledger is sealed: topic configs ``segment.*``, and the broker's ``ledger_idle_ms``."""

    segment_bytes: int
    segment_ms: int
    segment_jitter_ms: int = 0
    idle_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfigs:
    """The configs that the broker acts on, parsed."""

    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    min_insync_replicas: int
    segment_bytes: int
    segment_jitter_ms: int
    segment_ms: int
    is_log_append_time: bool
    ack_quorum: int
    """Bookies that have a batch before acks=all is answered; at most the number of copies."""
    takes_acks_all: bool
    """False if ``min.insync.replicas`` asks for more copies than there are."""
    is_compacted: bool
    """Whether each record needs a key."""
    codec: Codec | None
    """The codec of stored batches; None: that of the producer."""
    checks_records: bool
    """Whether each record of a batch is checked: records need keys, or have an earliest time."""
    examines_records: bool
    """Whether more than a batch's header is looked at: its records are checked, or may be compressed again."""

    def record_rules(self, now_ms: int) -> RecordRules:
        """Return what each record that is produced now must be."""
        if self.is_log_append_time:
            return RecordRules(self.is_compacted)
        earliest_ms, latest_ms = now_ms - self.message_timestamp_before_max_ms, now_ms + self.message_timestamp_after_max_ms
        return RecordRules(self.is_compacted, earliest_ms, latest_ms)

    @classmethod
    def of(cls, topic: Topic, defaults: Mapping[str, str]) -> TopicConfigs:
        """Return the configs in force for a topic, given the cluster's ``defaults``. Cached by equal configs."""
        return _parse(tuple(sorted(configs_in_force(topic, defaults).items())), topic.replication_factor)

    @classmethod
    def in_force(cls, topic: Topic, view: MetadataView) -> TopicConfigs:
        """Return the configs in force for a topic of ``view``: its own, the cluster's defaults, the built-in ones."""
        return cls.of(topic, topic_defaults(view))

    def jitter(self, random: Random) -> float:
        """Return the share of ``segment.jitter.ms`` (0 to 1) by which the next ledger is sealed early."""
        return random.random() if self.segment_jitter_ms else 0.0

    def roll_limits(self, idle_ms: int) -> RollLimits:
        """Return the limits at which the partition core seals a ledger."""
        return RollLimits(
            segment_bytes=self.segment_bytes, segment_ms=self.segment_ms, segment_jitter_ms=self.segment_jitter_ms,
            idle_ms=idle_ms,
        )  # fmt: skip


_DERIVED: Final = frozenset(
    {"is_log_append_time", "ack_quorum", "takes_acks_all", "is_compacted", "codec", "checks_records", "examines_records"}
)
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
    is_compacted = COMPACT in cleanup_policies(given)
    codec = _codec(given)
    is_append_time = value("message.timestamp.type") == "LogAppendTime"
    checks_records = is_compacted or (numbers["message_timestamp_before_max_ms"] < LONG_MAX and not is_append_time)
    if is_compacted:
        numbers["segment_ms"] = min(numbers["segment_ms"], int(value(MAX_COMPACTION_LAG_MS)))
    return TopicConfigs(
        **numbers, is_log_append_time=is_append_time,
        ack_quorum=min(wanted, replication_factor), takes_acks_all=wanted <= replication_factor,
        is_compacted=is_compacted, codec=codec,
        checks_records=checks_records, examines_records=checks_records or codec is not None,
    )  # fmt: skip


def _codec(configs: Mapping[str, str]) -> Codec | None:
    """Return the codec of ``compression.type``, with its level if that is set; gzip's -1 is its default."""
    name = configs.get(COMPRESSION_TYPE) or _PRODUCER
    if name == _PRODUCER:
        return None
    level = configs.get(f"compression.{name}.level")
    return Codec(NAMES["none" if name == "uncompressed" else name], None if level is None else int(level))
