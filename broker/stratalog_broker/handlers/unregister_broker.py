"""UnregisterBroker, version 0 (KIP-185): forgets that a stopped broker is drained.

Difference from Apache Kafka: a broker's registration ends with its session, so a stopped broker that is not drained is
BROKER_ID_NOT_REGISTERED, and a live one is refused.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.unregistration import unregister_broker
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import outcome_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import CLUSTER_NAME, Permissions, denial
from stratalog_metadata.client.api import MetadataClient

_ACCESS: Final = Access(Operation.ALTER, Resource.CLUSTER)


async def handle(context: RequestContext, request: Any, *, metadata: MetadataClient, permissions: Permissions) -> Any:
    if permissions.allows_cluster(context, _ACCESS.operation):
        error, message = await outcome_of(unregister_broker(metadata, request.broker_id))
    else:
        error, message = ErrorCode.cluster_authorization_failed, denial(context, _ACCESS, CLUSTER_NAME)
    return context.new("UnregisterBrokerResponse", error_code=error, error_message=message)


API: Final = HandlerInfo(key=64, min_version=0, max_version=0, handle=handle, access=_ACCESS)
