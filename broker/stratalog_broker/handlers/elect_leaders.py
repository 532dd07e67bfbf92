"""ElectLeaders, versions 0–2 (KIP-183, KIP-460): moves partitions to their preferred owners, by a handover.

Differences from Apache Kafka: the response comes when the partitions have moved. An unclean election is never needed, because
any live broker can own any partition without losing a record: it is refused with ELECTION_NOT_NEEDED, or with
ELIGIBLE_LEADERS_NOT_AVAILABLE while no broker is live.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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
_PREFERRED: Final = 0
_Rows = Mapping[NamedPartition, tuple[ErrorCode, str | None]]


async def handle(context: RequestContext, request: Any, *, orders: OwnershipOrders, permissions: Permissions) -> Any:
    wanted = _wanted(request)
    if not permissions.allows_cluster(context, _ACCESS.operation):
        denied = ErrorCode.cluster_authorization_failed, denial(context, _ACCESS, CLUSTER_NAME)
        return _response(context, denied[0], dict.fromkeys(wanted or (), denied))
    if getattr(request, "election_type", _PREFERRED) == _PREFERRED:
        try:
            outcomes = await orders.elect_preferred(wanted, request_timeout_s(request.timeout))
        except StratalogError as failure:
            return _response(context, admin_error_code_of(failure), {})
    else:
        outcomes = orders.refuse_unclean(wanted or ())
    return _response(context, ErrorCode.none, {name: _row(outcome) for name, outcome in outcomes.items()})


def _wanted(request: Any) -> list[NamedPartition] | None:
    if request.topic_partitions is None:
        return None
    named = (NamedPartition(topic.topic, index) for topic in request.topic_partitions for index in topic.partitions)
    return list(dict.fromkeys(named))


def _row(outcome: Outcome) -> tuple[ErrorCode, str | None]:
    return (ErrorCode.none, None) if outcome is None else (admin_error_code_of(outcome), outcome.message)


def _response(context: RequestContext, error: ErrorCode, rows: _Rows) -> Any:
    by_topic: defaultdict[str, list[Any]] = defaultdict(list)
    for name, (code, message) in rows.items():
        row = context.new("PartitionResult", partition_id=name.partition, error_code=code, error_message=message)
        by_topic[name.topic].append(row)
    return context.new(
        "ElectLeadersResponse",
        error_code=error,
        replica_election_results=tuple(
            context.new("ReplicaElectionResult", topic=topic, partition_result=tuple(found))
            for topic, found in by_topic.items()
        ),
    )


API: Final = HandlerInfo(key=43, min_version=0, max_version=2, handle=handle, access=_ACCESS)
