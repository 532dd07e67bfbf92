"""What the partitions of a topic must know of its configs on the hot path, parsed once."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.quorum import majority
from stratalog_metadata.records import Topic

_LONG_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLimits:
    """Kafka's configs of the same names; ``ack_quorum`` comes from min.insync.replicas, or else is a majority."""

    write_quorum: int
    ack_quorum: int
    segment_bytes: int
    segment_ms: int
    message_bytes_max: int
    log_append_time: bool
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int

    @classmethod
    def of(cls, topic: Topic) -> TopicLimits:
        """Limits of a topic, whose configs were validated when they were set."""
        configs = topic.configs
        write_quorum = max(topic.replication_factor, 1)
        wanted = int(configs.get("min.insync.replicas", majority(write_quorum)))
        return cls(
            write_quorum=write_quorum,
            ack_quorum=min(max(wanted, 1), write_quorum),
            segment_bytes=int(configs.get("segment.bytes", 1024 * 1024 * 1024)),
            segment_ms=int(configs.get("segment.ms", 7 * 86_400_000)),
            message_bytes_max=int(configs.get("max.message.bytes", 1_048_588)),
            log_append_time=configs.get("message.timestamp.type") == "LogAppendTime",
            timestamp_before_max_ms=int(configs.get("message.timestamp.before.max.ms", _LONG_MAX)),
            timestamp_after_max_ms=int(configs.get("message.timestamp.after.max.ms", _LONG_MAX)),
        )
