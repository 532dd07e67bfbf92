"""SyncGroup, versions 0–5. The response waits until the leader's assignment is in the log."""

from __future__ import annotations

from typing import Any, Final

from stratalog_broker.coordination.groups.core.messages import SyncAnswer, SyncRequest
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_ACCESS: Final = Access(Operation.READ, Resource.GROUP)


async def handle(context: RequestContext, request: Any, *, groups: GroupService, permissions: Permissions) -> Any:
    def make_request(ticket: int) -> SyncRequest:
        return SyncRequest(
            ticket=ticket,
            member_id=request.member_id,
            group_instance_id=getattr(request, "group_instance_id", None),
            generation=request.generation_id,
            protocol_type=getattr(request, "protocol_type", None),
            protocol_name=getattr(request, "protocol_name", None),
            assignments=tuple((row.member_id, row.assignment) for row in request.assignments),
        )

    try:
        permissions.check_group(context, _ACCESS, request.group_id)
        coordinator = groups.coordinator_of(request.group_id)
        answer = await coordinator.sync(request.group_id, make_request)
    except KafkaError as refused:
        answer = SyncAnswer(error=refused.code)
    return context.new(
        "SyncGroupResponse",
        error_code=answer.error, protocol_type=answer.protocol_type, protocol_name=answer.protocol_name,
        assignment=answer.assignment,
    )  # fmt: skip


API: Final = HandlerInfo(key=14, min_version=0, max_version=5, handle=handle, access=_ACCESS)
