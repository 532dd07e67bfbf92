"""LeaveGroup, versions 0–5 (several members, by member or instance id, since v3)."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.messages import LeavingMember
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_ACCESS: Final = Access(Operation.READ, Resource.GROUP)


async def handle(context: RequestContext, request: Any, *, groups: GroupService, permissions: Permissions) -> Any:
    leaving = _leaving(context, request)
    try:
        permissions.check_group(context, _ACCESS, request.group_id)
        coordinator = groups.coordinator_of(request.group_id)
        errors = await coordinator.leave(request.group_id, leaving)
    except KafkaError as refused:
        return context.new("LeaveGroupResponse", error_code=refused.code, members=())
    if context.api_version < 3:
        return context.new("LeaveGroupResponse", error_code=errors[0])
    rows = tuple(
        context.new("MemberResponse", member_id=member.member_id, group_instance_id=member.group_instance_id, error_code=error)
        for member, error in zip(leaving, errors, strict=True)
    )
    return context.new("LeaveGroupResponse", error_code=ErrorCode.none, members=rows)


def _leaving(context: RequestContext, request: Any) -> list[LeavingMember]:
    if context.api_version < 3:
        return [LeavingMember(member_id=request.member_id)]
    return [LeavingMember(member_id=row.member_id, group_instance_id=row.group_instance_id) for row in request.members]


API: Final = HandlerInfo(key=13, min_version=0, max_version=5, handle=handle, access=_ACCESS)
