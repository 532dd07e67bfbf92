"""DeleteGroups, versions 0–2: deletes groups without members and all their offsets."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_ACCESS: Final = Access(Operation.DELETE, Resource.GROUP)


async def handle(context: RequestContext, request: Any, *, groups: GroupService, permissions: Permissions) -> Any:
    rows = []
    for group_id in request.groups_names:
        error = await _delete(context, groups, permissions, group_id)
        rows.append(context.new("DeletableGroupResult", group_id=group_id, error_code=error))
    return context.new("DeleteGroupsResponse", results=tuple(rows))


async def _delete(context: RequestContext, groups: GroupService, permissions: Permissions, group_id: str) -> ErrorCode:
    try:
        permissions.check_group(context, _ACCESS, group_id)
        return await groups.coordinator_of(group_id).delete_group(group_id)
    except KafkaError as refused:
        return refused.code


API: Final = HandlerInfo(key=42, min_version=0, max_version=2, handle=handle, access=_ACCESS)
