"""ConsumerGroupHeartbeat, versions 0–1 (KIP-848): joins and leaves a group, reports owned partitions, returns what to own.

Since v1 members choose their ids and may subscribe by a regular expression in RE2's syntax, which matches topics that the
client may describe. UNSUPPORTED_VERSION below level 1 of ``group.version``. Differences from Apache Kafka: see
``groups/core/consumer/group.py``.
"""

from __future__ import annotations

import datetime
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.model import Partitions
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatAnswer, HeartbeatRequest
from stratalog_broker.coordination.groups.service import GroupService, check_group_version
from stratalog_broker.protocol.durations import milliseconds
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import DESCRIBE_TOPIC, Permissions
from stratalog_core.ports import Random
from stratalog_metadata.client.api import MetadataView

_ACCESS: Final = Access(Operation.READ, Resource.GROUP)
_OWN_IDS_SINCE: Final = 1


async def handle(
    context: RequestContext,
    request: Any,
    *,
    view: MetadataView,
    groups: GroupService,
    permissions: Permissions,
    random: Random,
) -> Any:
    try:
        check_group_version(view)
        permissions.check_group(context, _ACCESS, request.group_id)
        if permissions.denied(context, DESCRIBE_TOPIC, request.subscribed_topic_names or ()):
            return _response(context, HeartbeatAnswer(error=ErrorCode.topic_authorization_failed))
        coordinator = groups.coordinator_of(request.group_id)
        answer = await coordinator.consumer_heartbeat(
            request.group_id,
            lambda ticket: _heartbeat(context, permissions, random, request, ticket),
            needs_member_id=context.api_version >= _OWN_IDS_SINCE,
        )
    except KafkaError as refused:
        answer = HeartbeatAnswer(error=refused.code)
    return _response(context, answer)


def _heartbeat(
    context: RequestContext, permissions: Permissions, random: Random, request: Any, ticket: int
) -> HeartbeatRequest:
    def may_describe(names: frozenset[str]) -> frozenset[str]:
        return names - permissions.denied(context, DESCRIBE_TOPIC, names)

    member_id = request.member_id
    if not member_id and request.member_epoch == 0 and context.api_version < _OWN_IDS_SINCE:
        member_id = str(UUID(int=random.getrandbits(128), version=4))
    return HeartbeatRequest(
        ticket=ticket,
        member_id=member_id,
        member_epoch=request.member_epoch,
        client_id=context.client_id,
        client_host=f"/{context.client_host}",
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        rebalance_timeout_ms=milliseconds(request.rebalance_timeout),
        topic_names=request.subscribed_topic_names,
        topic_pattern=getattr(request, "subscribed_topic_regex", None),
        assignor=request.server_assignor,
        owned=None if request.topic_partitions is None else _owned(request.topic_partitions),
        may_describe=None if permissions.is_open else may_describe,
    )


def _owned(topics: Any) -> Partitions:
    return frozenset((topic.topic_id, index) for topic in topics if topic.topic_id is not None for index in topic.partitions)


def _response(context: RequestContext, answer: HeartbeatAnswer) -> Any:
    return context.new(
        "ConsumerGroupHeartbeatResponse",
        error_code=answer.error, error_message=answer.message, member_id=answer.member_id, member_epoch=answer.member_epoch,
        heartbeat_interval=datetime.timedelta(milliseconds=answer.heartbeat_interval_ms),
        assignment=None if answer.assignment is None else _assignment(context, answer.assignment),
    )  # fmt: skip


def _assignment(context: RequestContext, partitions: Partitions) -> Any:
    by_topic: dict[UUID, list[int]] = {}
    for topic_id, index in sorted(partitions):
        by_topic.setdefault(topic_id, []).append(index)
    rows = tuple(
        context.new("TopicPartitions", topic_id=topic_id, partitions=tuple(indexes)) for topic_id, indexes in by_topic.items()
    )
    return context.new("Assignment", topic_partitions=rows)


API: Final = HandlerInfo(key=68, min_version=0, max_version=1, handle=handle, access=_ACCESS)
