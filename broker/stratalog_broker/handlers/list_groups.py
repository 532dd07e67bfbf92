"""ListGroups, versions 0–5: the groups that this broker coordinates. Clients query every broker.

Filters by state (v4) and type (v5) ignore case, as in Kafka. A client that may not describe the cluster gets the groups that it
may describe.

A coordinator has up to a hundred thousand groups, so a response is made in pieces, and the event loop runs between them. Groups
may change meanwhile: each is described as it was at one time. One response is made at a time.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.arrays import with_array
from stratalog_broker.protocol.entities import encode_response
from stratalog_broker.protocol.frame import is_flexible
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.encoded_array import EncodedArray
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_KEY: Final = 16
_CLASSIC: Final = "classic"
_CONSUMER: Final = "consumer"
"""Both the type of a group and the protocol type of its members."""
_DESCRIBE_GROUP: Final = Access(Operation.DESCRIBE, Resource.GROUP)
_ROW_COST: Final = 1


class ListGroupsHandler:
    """Handles all ListGroups requests of the broker."""

    def __init__(self, *, groups: GroupService, permissions: Permissions) -> None:
        self._groups = groups
        self._permissions = permissions
        self._listing = asyncio.Lock()

    async def __call__(self, context: RequestContext, request: Any) -> bytes:
        """Return the response, from the coordinators that are loaded when it is begun."""
        async with self._listing:
            error = ErrorCode.coordinator_load_in_progress if self._groups.is_loading else ErrorCode.none
            rows = await self._rows(context, request)
        response = encode_response(context.new("ListGroupsResponse", error_code=error, groups=()))
        flexible = is_flexible(_KEY, context.api_version)
        return with_array(response, 1 if flexible else 0, rows.count, rows.join(), is_flexible=flexible)

    async def _rows(self, context: RequestContext, request: Any) -> EncodedArray:
        states = {state.lower() for state in getattr(request, "states_filter", ())}
        types = {kind.lower() for kind in getattr(request, "types_filter", ())}
        allows_all = self._permissions.allows_cluster(context, Operation.DESCRIBE)
        rows = EncodedArray(_ROW_COST)
        for coordinator in [application.coordinator for application in self._groups.coordinators()]:
            for group_id in coordinator.table.group_ids():
                row = _row(context, coordinator, group_id, states, types)
                if row is not None and (allows_all or self._permissions.allows(context, _DESCRIBE_GROUP, group_id)):
                    await rows.add(encode_response(row))
                else:
                    await rows.add(None)
        return rows


def _row(context: RequestContext, coordinator: GroupCoordinator, group_id: str, states: set[str], types: set[str]) -> Any:
    """Return the group; None if it is filtered out, or was deleted meanwhile."""
    table = coordinator.table
    if not table.exists(group_id):
        return None
    group, state = table.find(group_id), str(table.state_of(group_id))
    kind = _CONSUMER if group_id in table.consumers else _CLASSIC
    if (states and state.lower() not in states) or (types and kind not in types):
        return None
    protocol_type = _CONSUMER if kind == _CONSUMER else group.protocol_type if group is not None else ""
    return context.new("ListedGroup", group_id=group_id, protocol_type=protocol_type, group_state=state, group_type=kind)


API: Final = HandlerInfo(
    key=_KEY, min_version=0, max_version=5, handle=ListGroupsHandler, access=Access(Operation.DESCRIBE, Resource.CLUSTER)
)
