"""JoinGroup, versions 0–9. The response waits for the rebalance.

Static members exist since v5, MEMBER_ID_REQUIRED since v4 (KIP-394), ``skip_assignment`` since v9 (KIP-814). v0 has no
rebalance time-out, so the session time-out is used. Differences from Apache Kafka: see ``groups/core/group.py``.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from stratalog_broker.coordination.groups.core.messages import JoinAnswer, JoinRequest
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.durations import milliseconds
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_core.ports import Random

_ACCESS: Final = Access(Operation.READ, Resource.GROUP)
_ID_PREFIX_CHARACTERS_MAX: Final = 255


async def handle(
    context: RequestContext, request: Any, *, groups: GroupService, permissions: Permissions, random: Random
) -> Any:
    def make_request(ticket: int) -> JoinRequest:
        return _join_request(context, random, request, ticket)

    try:
        permissions.check_group(context, _ACCESS, request.group_id)
    except KafkaError as denied:
        return _response(context, JoinAnswer(error=denied.code))
    try:
        coordinator = groups.coordinator_of(request.group_id)
        answer = await coordinator.join(request.group_id, make_request)
    except KafkaError as refused:
        answer = JoinAnswer(error=refused.code, member_id=request.member_id)
    return _response(context, answer)


def _join_request(context: RequestContext, random: Random, request: Any, ticket: int) -> JoinRequest:
    session_timeout_ms = milliseconds(request.session_timeout)
    rebalance_timeout_ms = milliseconds(request.rebalance_timeout) if context.api_version >= 1 else 0
    return JoinRequest(
        ticket=ticket,
        member_id=request.member_id,
        fresh_member_id=_fresh_member_id(context, random, request),
        group_instance_id=getattr(request, "group_instance_id", None),
        client_id=context.client_id,
        client_host=f"/{context.client_host}",
        protocol_type=request.protocol_type,
        protocols=tuple({protocol.name: protocol.metadata for protocol in request.protocols}.items()),
        session_timeout_ms=session_timeout_ms,
        rebalance_timeout_ms=rebalance_timeout_ms if rebalance_timeout_ms > 0 else session_timeout_ms,
        requires_known_member=context.api_version >= 4,
        can_skip_assignment=context.api_version >= 9,
    )


def _fresh_member_id(context: RequestContext, random: Random, request: Any) -> str:
    """Return a new member id in Kafka's form: instance id or client id, then a random UUID."""
    prefix = getattr(request, "group_instance_id", None) or context.client_id
    random_id = UUID(int=random.getrandbits(128), version=4)
    return f"{prefix[:_ID_PREFIX_CHARACTERS_MAX]}-{random_id}"


def _response(context: RequestContext, answer: JoinAnswer) -> Any:
    members = tuple(
        context.new(
            "JoinGroupResponseMember",
            member_id=member.member_id, group_instance_id=member.group_instance_id, metadata=member.metadata,
        )
        for member in answer.members
    )  # fmt: skip
    protocol_name = answer.protocol_name if context.api_version >= 7 else answer.protocol_name or ""
    return context.new(
        "JoinGroupResponse",
        error_code=answer.error, generation_id=answer.generation, protocol_type=answer.protocol_type,
        protocol_name=protocol_name, leader=answer.leader, skip_assignment=answer.skip_assignment,
        member_id=answer.member_id, members=members,
    )  # fmt: skip


API: Final = HandlerInfo(key=11, min_version=0, max_version=9, handle=handle, access=_ACCESS)
