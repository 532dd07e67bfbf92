"""AlterPartitionReassignments, versions 0–1 (KIP-455, KIP-860): assigns brokers to partitions, the first as owner, or cancels.

Differences from Apache Kafka: copies are on bookies, so nothing is copied; a reassignment is over as soon as the first broker
has taken the partition over. The replication factor belongs to the topic (``admin/assigned_copies.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.ownership_orders import NamedPartition, Outcome, OwnershipOrders
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import admin_error_code_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import CLUSTER_NAME, Permissions, denial
from stratalog_core.errors import StratalogError

_ACCESS: Final = Access(Operation.ALTER, Resource.CLUSTER)


async def handle(context: RequestContext, request: Any, *, orders: OwnershipOrders, permissions: Permissions) -> Any:
    may_change_factor = getattr(request, "allow_replication_factor_change", True)
    respond = partial(context.new, "AlterPartitionReassignmentsResponse", allow_replication_factor_change=may_change_factor)
    if not permissions.allows_cluster(context, _ACCESS.operation):
        message = denial(context, _ACCESS, CLUSTER_NAME)
        return respond(error_code=ErrorCode.cluster_authorization_failed, error_message=message, responses=())
    wanted = {
        NamedPartition(topic.name, row.partition_index): row.replicas for topic in request.topics for row in topic.partitions
    }
    try:
        outcomes = await orders.reassign(wanted, request_timeout_s(request.timeout), may_change_factor=may_change_factor)
    except StratalogError as failure:
        return respond(error_code=admin_error_code_of(failure), error_message=failure.message, responses=())
    rows = tuple(_topic(context, topic, outcomes) for topic in request.topics)
    return respond(error_code=ErrorCode.none, error_message=None, responses=rows)


def _topic(context: RequestContext, topic: Any, outcomes: dict[NamedPartition, Outcome]) -> Any:
    rows = [(row.partition_index, outcomes[NamedPartition(topic.name, row.partition_index)]) for row in topic.partitions]
    partitions = (
        context.new(
            "ReassignablePartitionResponse",
            partition_index=index, error_code=ErrorCode.none if failure is None else admin_error_code_of(failure),
            error_message=None if failure is None else failure.message,
        )
        for index, failure in rows
    )  # fmt: skip
    return context.new("ReassignableTopicResponse", name=topic.name, partitions=tuple(partitions))


API: Final = HandlerInfo(key=45, min_version=0, max_version=1, handle=handle, access=_ACCESS)
