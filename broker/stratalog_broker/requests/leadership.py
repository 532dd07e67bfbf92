"""Error codes for a partition that this broker does not serve and for a client's outdated leader epoch."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions


def why_not_here(partitions: Partitions, topic: str, partition: int) -> ErrorCode:
    """Return NOT_LEADER_OR_FOLLOWER for a partition that exists, else UNKNOWN_TOPIC_OR_PARTITION."""
    known = partitions.topic_by_name(topic.encode())
    if known is None or not 0 <= partition < known.partition_count:
        return ErrorCode.unknown_topic_or_partition
    return ErrorCode.not_leader_or_follower


def leader_epoch_error(log: PartitionLog, wanted: Any) -> ErrorCode:
    """Compare the client's ``current_leader_epoch``, if the request has one, with the owner's (KIP-320)."""
    claimed = getattr(wanted, "current_leader_epoch", -1)
    if claimed in (-1, log.core.leader_epoch):
        return ErrorCode.none
    return ErrorCode.fenced_leader_epoch if claimed < log.core.leader_epoch else ErrorCode.unknown_leader_epoch
