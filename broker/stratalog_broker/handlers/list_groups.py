"""ListGroups, versions 0–5: the groups that this broker coordinates. Clients query every broker.

Filters by state (v4) and type (v5) ignore case, as in Kafka. A client that may not describe the cluster gets the groups that it
may describe.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_CLASSIC: Final = "classic"
_CONSUMER: Final = "consumer"
"""Both the type of a group and the protocol type of its members."""
_DESCRIBE_GROUP: Final = Access(Operation.DESCRIBE, Resource.GROUP)


async def handle(context: RequestContext, request: Any, *, groups: GroupService, permissions: Permissions) -> Any:
    states = {state.lower() for state in getattr(request, "states_filter", ())}
    types = {kind.lower() for kind in getattr(request, "types_filter", ())}
    rows: list[Any] = []
    for application in groups.coordinators():
        rows += _rows(context, application.coordinator, states, types)
    if not permissions.allows_cluster(context, Operation.DESCRIBE):
        denied = permissions.denied(context, _DESCRIBE_GROUP, (row.group_id for row in rows))
        rows = [row for row in rows if row.group_id not in denied]
    error = ErrorCode.coordinator_load_in_progress if groups.is_loading else ErrorCode.none
    return context.new("ListGroupsResponse", error_code=error, groups=tuple(rows))


def _rows(context: RequestContext, coordinator: GroupCoordinator, states: set[str], types: set[str]) -> list[Any]:
    rows = []
    for group_id in coordinator.table.group_ids():
        group, state = coordinator.table.find(group_id), str(coordinator.table.state_of(group_id))
        kind = _CONSUMER if group_id in coordinator.table.consumers else _CLASSIC
        if (not states or state.lower() in states) and (not types or kind in types):
            protocol_type = _CONSUMER if kind == _CONSUMER else group.protocol_type if group is not None else ""
            rows.append(
                context.new("ListedGroup", group_id=group_id, protocol_type=protocol_type, group_state=state, group_type=kind)
            )
    return rows


API: Final = HandlerInfo(
    key=16, min_version=0, max_version=5, handle=handle, access=Access(Operation.DESCRIBE, Resource.CLUSTER)
)
