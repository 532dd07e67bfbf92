"""DescribeGroups, versions 0–6, of classic groups.

An unknown group, or one of the consumer protocol, is described as Dead (since v6 with GROUP_ID_NOT_FOUND).

Difference from Apache Kafka: a group that the request repeats is answered INVALID_REQUEST from the second time on.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator
from stratalog_broker.coordination.groups.core.group import Group
from stratalog_broker.coordination.groups.core.rebalance import GroupState
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import OPERATIONS_UNKNOWN, Permissions
from stratalog_broker.requests.repeated_names import first_or_repeated

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.GROUP)
_NOT_FOUND_SINCE: Final = 6


async def handle(context: RequestContext, request: Any, *, groups: GroupService, permissions: Permissions) -> Any:
    wants_operations = getattr(request, "include_authorized_operations", False)
    rows = tuple(
        _row(context, group_id, error=ErrorCode.invalid_request)
        if is_repeated
        else _describe(context, groups, permissions, group_id, wants_operations=wants_operations)
        for group_id, is_repeated in first_or_repeated(request.groups)
    )
    return context.new("DescribeGroupsResponse", groups=rows)


def _describe(
    context: RequestContext, groups: GroupService, permissions: Permissions, group_id: str, *, wants_operations: bool
) -> Any:
    try:
        permissions.check_group(context, _ACCESS, group_id)
        coordinator = groups.coordinator_of(group_id).coordinator
    except KafkaError as refused:
        return _row(context, group_id, error=refused.code)
    if group_id in coordinator.table.consumers:
        return _absent(context, group_id, f"group {group_id} is not a classic group")
    state = coordinator.table.state_of(group_id)
    if state is GroupState.DEAD:
        return _absent(context, group_id, f"group {group_id} not found")
    operations = permissions.operations(context, Resource.GROUP, group_id, wanted=wants_operations)
    return _present(context, coordinator, group_id, state, operations)


def _absent(context: RequestContext, group_id: str, message: str) -> Any:
    if context.api_version < _NOT_FOUND_SINCE:
        return _row(context, group_id, state=GroupState.DEAD)
    return _row(context, group_id, error=ErrorCode.group_id_not_found, message=message, state=GroupState.DEAD)


def _present(context: RequestContext, coordinator: GroupCoordinator, group_id: str, state: str, operations: int) -> Any:
    group = coordinator.table.find(group_id)
    if group is None:
        return _row(context, group_id, state=state, operations=operations)
    protocol_name = group.protocol_name if state is GroupState.STABLE else None
    return _row(
        context, group_id, state=state, protocol_type=group.protocol_type, protocol_data=protocol_name or "",
        members=_members(context, group, protocol_name), operations=operations,
    )  # fmt: skip


def _members(context: RequestContext, group: Group, protocol_name: str | None) -> tuple[Any, ...]:
    """Return the member rows; metadata and assignment are empty unless the group is stable."""
    return tuple(
        context.new(
            "DescribedGroupMember",
            member_id=member.member_id,
            group_instance_id=member.group_instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            member_metadata=member.metadata_for(protocol_name) if protocol_name is not None else b"",
            member_assignment=member.assignment if protocol_name is not None else b"",
        )
        for member in group.membership.members.values()
    )


def _row(
    context: RequestContext, group_id: str, *, error: ErrorCode = ErrorCode.none, message: str | None = None,
    state: str = "", protocol_type: str = "", protocol_data: str = "", members: tuple[Any, ...] = (),
    operations: int = OPERATIONS_UNKNOWN,
) -> Any:  # fmt: skip
    return context.new(
        "DescribedGroup",
        error_code=error, error_message=message, group_id=group_id, group_state=str(state), protocol_type=protocol_type,
        protocol_data=protocol_data, members=members, authorized_operations=operations,
    )  # fmt: skip


API: Final = HandlerInfo(key=15, min_version=0, max_version=6, handle=handle, access=_ACCESS)
