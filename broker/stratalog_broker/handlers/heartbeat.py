"""Heartbeat, versions 0–4."""

from __future__ import annotations

from typing import Any, Final

from stratalog_broker.context import RequestContext
from stratalog_broker.handlers.info import HandlerInfo
from stratalog_broker.protocol.errors import KafkaError


async def handle(context: RequestContext, request: Any) -> Any:
    instance_id = getattr(request, "group_instance_id", None)
    try:
        coordinator = context.services.groups.coordinator_of(request.group_id)
        error = coordinator.heartbeat(request.group_id, request.member_id, instance_id, request.generation_id)
    except KafkaError as refused:
        error = refused.code
    return context.new("HeartbeatResponse", error_code=error)


API: Final = HandlerInfo(key=12, min_version=0, max_version=4, handle=handle)
