"""Heartbeat, versions 0–4.

While a coordinator is loading after a takeover it returns success, as Kafka's does: it cannot check the member yet, and
clients do not expect that error here (aiokafka gives up on it). The member's session restarts when the group is loaded.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_ACCESS: Final = Access(Operation.READ, Resource.GROUP)


async def handle(context: RequestContext, request: Any, *, groups: GroupService, permissions: Permissions) -> Any:
    instance_id = getattr(request, "group_instance_id", None)
    try:
        permissions.check_group(context, _ACCESS, request.group_id)
        coordinator = groups.coordinator_of(request.group_id)
        error = coordinator.heartbeat(request.group_id, request.member_id, instance_id, request.generation_id)
    except KafkaError as refused:
        error = ErrorCode.none if refused.code is ErrorCode.coordinator_load_in_progress else refused.code
    return context.new("HeartbeatResponse", error_code=error)


API: Final = HandlerInfo(key=12, min_version=0, max_version=4, handle=handle, access=_ACCESS)
