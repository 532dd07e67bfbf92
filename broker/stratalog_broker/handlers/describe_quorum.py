"""DescribeQuorum, versions 0–2 (KIP-595, KIP-836, KIP-853): leader, voters and learners of the metadata quorum, and their lag.

Differences from Apache Kafka: the quorum's log is not a topic that can be read; it is described under Kafka's name
``__cluster_metadata``. Node ids are those of metadata nodes, which are not brokers. Learners are returned as observers.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.errors import error_code_of
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import CLUSTER_NAME, Permissions, denial
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.protocol.messages import MemberStatus, StatusAnswer

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.CLUSTER)
TOPIC: Final = "__cluster_metadata"
_PARTITION: Final = 0
_LISTENER: Final = "METADATA"
_UNKNOWN: Final = -1
_TIMEOUT_S: Final = 5.0


async def handle(
    context: RequestContext, request: Any, *, metadata: MetadataClient, clock: Clock, permissions: Permissions
) -> Any:
    if not permissions.allows_cluster(context, _ACCESS.operation):
        denied = denial(context, _ACCESS, CLUSTER_NAME)
        return _response(context, ErrorCode.cluster_authorization_failed, denied, ())
    asked = {(topic.topic_name, row.partition_index) for topic in request.topics for row in topic.partitions}
    if asked != {(TOPIC, _PARTITION)}:
        return _response(context, ErrorCode.none, None, tuple(_unknown(context, topic) for topic in request.topics))
    try:
        status = await metadata.quorum_status(_TIMEOUT_S)
    except StratalogError as failure:
        return _response(context, error_code_of(failure), failure.message, ())
    topic = context.new("TopicData", topic_name=TOPIC, partitions=(_partition(context, status, clock.wall_ms()),))
    return _response(context, ErrorCode.none, None, (topic,), status)


def _response(
    context: RequestContext, error: ErrorCode, message: str | None, topics: tuple[Any, ...], status: StatusAnswer | None = None
) -> Any:
    nodes = tuple(_node(context, member) for member in status.members) if status is not None else ()
    return context.new("DescribeQuorumResponse", error_code=error, error_message=message, topics=topics, nodes=nodes)


def _unknown(context: RequestContext, topic: Any) -> Any:
    rows = (
        context.new(
            "PartitionData",
            partition_index=row.partition_index, error_code=ErrorCode.unknown_topic_or_partition, error_message=None,
            leader_id=_UNKNOWN, leader_epoch=_UNKNOWN, high_watermark=_UNKNOWN, current_voters=(), observers=(),
        )
        for row in topic.partitions
    )  # fmt: skip
    return context.new("TopicData", topic_name=topic.topic_name, partitions=tuple(rows))


def _partition(context: RequestContext, status: StatusAnswer, now_ms: int) -> Any:
    is_leader = status.node_id == status.leader
    error = ErrorCode.none if is_leader else ErrorCode.leader_not_available
    voters = [member for member in status.members if member.voter]
    learners = [member for member in status.members if not member.voter]
    return context.new(
        "PartitionData",
        partition_index=_PARTITION, error_code=error,
        error_message=None if is_leader else "the metadata quorum has no leader now",
        leader_id=status.leader if is_leader else _UNKNOWN, leader_epoch=status.term, high_watermark=status.commit_index + 1,
        current_voters=tuple(_replica(context, status, member, now_ms) for member in voters),
        observers=tuple(_replica(context, status, member, now_ms) for member in learners),
    )  # fmt: skip


def _replica(context: RequestContext, status: StatusAnswer, member: MemberStatus, now_ms: int) -> Any:
    """Return one member's row. Its offset is the first that it lacks, and its times are by this broker's clock."""
    is_leader = member.node_id == status.leader
    heard_ms = now_ms - member.contact_ms if member.contact_ms >= 0 else _UNKNOWN
    is_caught_up = is_leader or member.match_index >= status.commit_index
    end = status.log_last_index if is_leader else member.match_index
    return context.new(
        "ReplicaState",
        replica_id=member.node_id, replica_directory_id=UUID(member.identity) if member.identity else None,
        log_end_offset=end + 1 if end >= 0 else _UNKNOWN, last_fetch_timestamp=heard_ms,
        last_caught_up_timestamp=heard_ms if is_caught_up else _UNKNOWN,
    )  # fmt: skip


def _node(context: RequestContext, member: MemberStatus) -> Any:
    host, _, port = member.address.rpartition(":")
    listeners = (context.new("Listener", name=_LISTENER, host=host.strip("[]"), port=int(port)),) if host else ()
    return context.new("Node", node_id=member.node_id, listeners=listeners)


API: Final = HandlerInfo(
    key=55, min_version=0, max_version=2, handle=handle, access=_ACCESS, needs_quorum=True
)  # fmt: skip
