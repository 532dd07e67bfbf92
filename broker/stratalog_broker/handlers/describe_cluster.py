"""DescribeCluster, versions 0–2: cluster id and live brokers.

Differences from Apache Kafka: the controller is the metadata quorum's leader, which Kafka clients cannot reach, so the live
broker with the lowest id is returned instead; any broker serves administrative requests. Dead brokers (fenced ones in v2) are
not listed. Controller endpoints (type 2, v1) are refused with MISMATCHED_ENDPOINT_TYPE, as by Kafka's brokers: DescribeQuorum
lists the metadata nodes.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.cluster.advertised_brokers import AdvertisedBrokers
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import CLUSTER_NAME, Permissions
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import CLUSTER_KEY, Broker, Cluster

_BROKERS: Final = 1
_CONTROLLERS: Final = 2


async def handle(
    context: RequestContext,
    request: Any,
    *,
    view: MetadataView,
    advertised_brokers: AdvertisedBrokers,
    permissions: Permissions,
) -> Any:
    endpoint_type = getattr(request, "endpoint_type", _BROKERS)
    cluster = view.find(Cluster, CLUSTER_KEY)
    brokers = advertised_brokers.live()
    error, message = ErrorCode.none, None
    if endpoint_type != _BROKERS:
        known = endpoint_type == _CONTROLLERS
        error = ErrorCode.mismatched_endpoint_type if known else ErrorCode.unsupported_endpoint_type
        message, brokers = f"endpoint type is {endpoint_type}; a broker serves type 1 (brokers)", []
    return context.new(
        "DescribeClusterResponse",
        error_code=error, error_message=message, endpoint_type=endpoint_type,
        cluster_id=cluster.cluster_id if cluster is not None else "",
        controller_id=brokers[0].broker_id if brokers else -1,
        brokers=tuple(_row(context, broker) for broker in brokers),
        cluster_authorized_operations=permissions.operations(
            context, Resource.CLUSTER, CLUSTER_NAME, wanted=request.include_cluster_authorized_operations
        ),
    )  # fmt: skip


def _row(context: RequestContext, broker: Broker) -> Any:
    host, port = broker.address_for(context.listener)
    return context.new(
        "DescribeClusterBroker",
        broker_id=broker.broker_id, host=host, port=port, rack=broker.rack or None, is_fenced=False,
    )  # fmt: skip


API: Final = HandlerInfo(
    key=60, min_version=0, max_version=2, handle=handle, access=Access(Operation.DESCRIBE, Resource.CLUSTER)
)
