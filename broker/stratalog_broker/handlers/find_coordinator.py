"""FindCoordinator, versions 0–6 (several keys since v4). The first call for a key type creates its internal topic.

Difference from Apache Kafka: share groups (key type 2) have no coordinators; the answer is INVALID_REQUEST, as for a key type
that does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_metadata.records import Broker

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.GROUP)
_TRANSACTION_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
_TRANSACTION_KEY_TYPE: Final = 1
_GROUP_KEY_TYPE: Final = 0  # v0 has no key type: it finds coordinators of groups


async def handle(context: RequestContext, request: Any, *, locator: CoordinatorLocator, permissions: Permissions) -> Any:
    key_type = getattr(request, "key_type", _GROUP_KEY_TYPE)
    if context.api_version >= 4:
        found = await _find(context, locator, permissions, key_type, request.coordinator_keys)
        rows = (context.new("Coordinator", key=key, **_fields(context, found[key])) for key in request.coordinator_keys)
        return context.new("FindCoordinatorResponse", coordinators=tuple(rows))
    found = await _find(context, locator, permissions, key_type, (request.key,))
    return context.new("FindCoordinatorResponse", **_fields(context, found[request.key]))


async def _find(
    context: RequestContext, locator: CoordinatorLocator, permissions: Permissions, key_type: int, keys: Sequence[str]
) -> dict[str, Broker | KafkaError]:
    """Return the coordinator of each key, or why the client is not told it."""
    found = dict[str, Broker | KafkaError]()
    for key in keys:
        try:
            if key_type == _GROUP_KEY_TYPE:
                permissions.check_group(context, _ACCESS, key)
            elif key_type == _TRANSACTION_KEY_TYPE:
                permissions.check_transactional_id(context, _TRANSACTION_ACCESS, key)
        except KafkaError as denied:
            found[key] = denied
    allowed = [key for key in keys if key not in found]
    if allowed:  # else the topic need not exist
        found.update(zip(allowed, await locator.find(key_type, allowed), strict=True))
    return found


def _fields(context: RequestContext, found: Broker | KafkaError) -> dict[str, Any]:
    if isinstance(found, KafkaError):
        return {"error_code": found.code, "error_message": found.message, "node_id": -1, "host": "", "port": -1}
    host, port = found.address_for(context.listener)
    return {"error_code": ErrorCode.none, "error_message": None, "node_id": found.broker_id, "host": host, "port": port}


API: Final = HandlerInfo(key=10, min_version=0, max_version=6, handle=handle, access=_ACCESS)
