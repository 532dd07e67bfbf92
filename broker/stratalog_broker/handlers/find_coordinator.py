"""FindCoordinator, versions 0–6 (several keys since v4). The first call for a key type creates its internal topic.

Difference from Apache Kafka: share groups (key type 2) have no coordinators; the answer is INVALID_REQUEST, as for a key type
that does not exist.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.GROUP)
_TRANSACTION_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
_TRANSACTION_KEY_TYPE: Final = 1
_GROUP_KEY_TYPE: Final = 0  # v0 has no key type: it finds coordinators of groups
_KEYS_MAX: Final = 1_000


async def handle(context: RequestContext, request: Any, *, locator: CoordinatorLocator, permissions: Permissions) -> Any:
    key_type = getattr(request, "key_type", _GROUP_KEY_TYPE)
    if context.api_version >= 4:
        keys = request.coordinator_keys[:_KEYS_MAX]
        found = [await _find(context, locator, permissions, key_type, key) for key in keys]
        rows = tuple(context.new("Coordinator", key=key, **fields) for key, fields in zip(keys, found, strict=True))
        return context.new("FindCoordinatorResponse", coordinators=rows)
    return context.new("FindCoordinatorResponse", **await _find(context, locator, permissions, key_type, request.key))


async def _find(
    context: RequestContext, locator: CoordinatorLocator, permissions: Permissions, key_type: int, key: str
) -> dict[str, Any]:
    try:
        if key_type == _GROUP_KEY_TYPE:
            permissions.check_group(context, _ACCESS, key)
        elif key_type == _TRANSACTION_KEY_TYPE:
            permissions.check_transactional_id(context, _TRANSACTION_ACCESS, key)
        coordinator = await locator.find(key_type, key)
    except KafkaError as refused:
        return _fields(refused.code, refused.message)
    return _fields(ErrorCode.none, None, coordinator.broker_id, *coordinator.address_for(context.listener))


def _fields(error: ErrorCode, message: str | None, node_id: int = -1, host: str = "", port: int = -1) -> dict[str, Any]:
    return {"error_code": error, "error_message": message, "node_id": node_id, "host": host, "port": port}


API: Final = HandlerInfo(key=10, min_version=0, max_version=6, handle=handle, access=_ACCESS)
