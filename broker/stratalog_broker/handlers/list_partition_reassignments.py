"""ListPartitionReassignments, version 0 (KIP-455): reassignments whose partition has not been taken over yet.

A partition that changes only its owner adds and removes no replica; its replicas are listed in their new order.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.ownership_orders import NamedPartition, OwnershipOrders, Reassignment
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import CLUSTER_NAME, Permissions, denial

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.CLUSTER)


async def handle(context: RequestContext, request: Any, *, orders: OwnershipOrders, permissions: Permissions) -> Any:
    error, message, found = ErrorCode.none, None, defaultdict[str, list[Reassignment]](list)
    if not permissions.allows_cluster(context, _ACCESS.operation):
        error, message = ErrorCode.cluster_authorization_failed, denial(context, _ACCESS, CLUSTER_NAME)
    else:
        for one in orders.reassignments(_wanted(request)):
            found[one.name.topic].append(one)
    return context.new(
        "ListPartitionReassignmentsResponse",
        error_code=error, error_message=message,
        topics=tuple(
            context.new("OngoingTopicReassignment", name=name, partitions=tuple(_row(context, one) for one in rows))
            for name, rows in found.items()
        ),
    )  # fmt: skip


def _wanted(request: Any) -> set[NamedPartition] | None:
    if request.topics is None:
        return None
    return {NamedPartition(topic.name, index) for topic in request.topics for index in topic.partition_indexes}


def _row(context: RequestContext, one: Reassignment) -> Any:
    return context.new(
        "OngoingPartitionReassignment",
        partition_index=one.name.partition, replicas=tuple(dict.fromkeys((*one.replicas, *one.before))),
        adding_replicas=tuple(broker for broker in one.replicas if one.before and broker not in one.before),
        removing_replicas=tuple(broker for broker in one.before if broker not in one.replicas),
    )  # fmt: skip


API: Final = HandlerInfo(key=46, min_version=0, max_version=0, handle=handle, access=_ACCESS)
