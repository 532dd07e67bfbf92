"""FindCoordinator, versions 0–6 (several keys since v4). The first call creates ``__consumer_offsets``.

Difference from Apache Kafka: only groups (key type 0) have coordinators; other key types return INVALID_REQUEST.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_core.errors import StratalogError

GROUP: Final = 0
_KEYS_MAX: Final = 1_000


async def handle(context: RequestContext, request: Any, *, groups: GroupService) -> Any:
    key_type = getattr(request, "key_type", GROUP)
    if context.api_version >= 4:
        keys = request.coordinator_keys[:_KEYS_MAX]
        found = [await _find(context, groups, key_type, key) for key in keys]
        rows = tuple(context.new("Coordinator", key=key, **fields) for key, fields in zip(keys, found, strict=True))
        return context.new("FindCoordinatorResponse", coordinators=rows)
    return context.new("FindCoordinatorResponse", **await _find(context, groups, key_type, request.key))


async def _find(context: RequestContext, groups: GroupService, key_type: int, key: str) -> dict[str, Any]:
    if key_type != GROUP:
        return _fields(ErrorCode.invalid_request, f"coordinators of key type {key_type} are not served; type 0 (group) is")
    try:
        coordinator = await groups.find(key)
    except KafkaError as refused:
        # Creating the topic may fail for other reasons; the client must retry in every case.
        return _fields(ErrorCode.coordinator_not_available, refused.message)
    except StratalogError as failure:
        return _fields(ErrorCode.coordinator_not_available, failure.message)
    return _fields(ErrorCode.none, None, coordinator.broker_id, *coordinator.address_for(context.listener))


def _fields(error: ErrorCode, message: str | None, node_id: int = -1, host: str = "", port: int = -1) -> dict[str, Any]:
    return {"error_code": error, "error_message": message, "node_id": node_id, "host": host, "port": port}


API: Final = HandlerInfo(key=10, min_version=0, max_version=6, handle=handle, access=Access(Operation.DESCRIBE, Resource.GROUP))
