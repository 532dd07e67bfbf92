"""DescribeTopicPartitions, version 0 (KIP-966): topics with their partitions, in pages.

Differences from Apache Kafka: replicas are derived, because copies are on bookies (``replicas.py``); the lists of eligible
and last known leader replicas are always empty, not null: the protocol allows null, but Java's admin client does not.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.cluster.replicas import Replicas
from stratalog_broker.protocol.metadata import PartitionState
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Topic, topic_key

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TOPIC)


PAGE_PARTITIONS_MAX: Final = 2_000


async def handle(context: RequestContext, request: Any, *, view: MetadataView, permissions: Permissions) -> Any:
    if request.cursor is not None and request.cursor.partition_index < 0:
        refused = tuple(_refused(context, str(topic.name), ErrorCode.invalid_request) for topic in request.topics)
        return context.new("DescribeTopicPartitionsResponse", topics=refused, next_cursor=None)
    replicas = Replicas(view)
    room = min(max(request.response_partition_limit, 1), PAGE_PARTITIONS_MAX)
    rows: list[Any] = []
    cursor = None
    wanted = _wanted(view, request)
    denied = permissions.denied(context, _ACCESS, (name for name, _ in wanted))
    for name, first in wanted:
        if name in denied and not request.topics:
            continue
        if room == 0:
            cursor = context.new("Cursor", topic_name=name, partition_index=first)
            break
        topic = view.find(Topic, topic_key(name)) if name not in denied else None
        if topic is None:
            code = ErrorCode.topic_authorization_failed if name in denied else ErrorCode.unknown_topic_or_partition
            rows.append(_refused(context, name, code))
            continue
        end = min(topic.partition_count, first + room)
        rows.append(_topic(context, replicas, permissions, topic, range(first, end)))
        room -= max(end - first, 0)
        if end < topic.partition_count:
            cursor = context.new("Cursor", topic_name=name, partition_index=end)
            break
    return context.new("DescribeTopicPartitionsResponse", topics=tuple(rows), next_cursor=cursor)


def _wanted(view: MetadataView, request: Any) -> list[tuple[str, int]]:
    """Return the topic names in order, starting at the cursor, each with its first partition."""
    asked = {str(topic.name) for topic in request.topics}
    names = sorted(asked or {topic.name for topic in view.all(Topic)})
    if request.cursor is None:
        return [(name, 0) for name in names]
    start = str(request.cursor.topic_name)
    return [(name, request.cursor.partition_index if name == start else 0) for name in names if name >= start]


def _refused(context: RequestContext, name: str, code: ErrorCode) -> Any:
    return context.new(
        "DescribeTopicPartitionsResponseTopic",
        error_code=code, name=name, topic_id=None, is_internal=False, partitions=(),
    )  # fmt: skip


def _topic(context: RequestContext, replicas: Replicas, permissions: Permissions, topic: Topic, indexes: range) -> Any:
    return context.new(
        "DescribeTopicPartitionsResponseTopic",
        error_code=ErrorCode.none, name=topic.name, topic_id=topic.topic_id, is_internal=topic.internal,
        partitions=tuple(_partition(context, index, replicas.of(topic, index)) for index in indexes),
        topic_authorized_operations=permissions.operations(context, Resource.TOPIC, topic.name),
    )  # fmt: skip


def _partition(context: RequestContext, index: int, state: PartitionState) -> Any:
    return context.new(
        "DescribeTopicPartitionsResponsePartition",
        error_code=ErrorCode.none if state.leader >= 0 else ErrorCode.leader_not_available,
        partition_index=index, leader_id=state.leader, leader_epoch=state.leader_epoch, replica_nodes=state.replicas,
        isr_nodes=state.in_sync, eligible_leader_replicas=(), last_known_elr=(), offline_replicas=state.offline,
    )  # fmt: skip


API: Final = HandlerInfo(key=75, min_version=0, max_version=0, handle=handle, access=_ACCESS)
