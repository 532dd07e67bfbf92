"""DescribeCluster, versions 0–2: cluster id and live brokers.

Differences from Apache Kafka: the controller is the metadata quorum's leader, which Kafka clients cannot reach, so the live
broker with the lowest id is returned instead; any broker serves administrative requests. Controller endpoints (type 2, v1)
are refused. Dead brokers (fenced ones in v2) are not listed.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.cluster.advertised_brokers import AdvertisedBrokers
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import CLUSTER_KEY, Broker, Cluster

_BROKERS: Final = 1


async def handle(context: RequestContext, request: Any, *, view: MetadataView, advertised_brokers: AdvertisedBrokers) -> Any:
    endpoint_type = getattr(request, "endpoint_type", _BROKERS)
    cluster = view.find(Cluster, CLUSTER_KEY)
    brokers = advertised_brokers.live()
    error, message = ErrorCode.none, None
    if endpoint_type != _BROKERS:
        error, message, brokers = ErrorCode.unsupported_endpoint_type, "endpoint type must be 1 (brokers)", []
    return context.new(
        "DescribeClusterResponse",
        error_code=error, error_message=message, endpoint_type=endpoint_type,
        cluster_id=cluster.cluster_id if cluster is not None else "",
        controller_id=brokers[0].broker_id if brokers else -1,
        brokers=tuple(_row(context, broker) for broker in brokers),
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
