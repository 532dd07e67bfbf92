"""ListConfigResources, versions 0–1 (KIP-1142): names of the resources that have configs; version 0 asks for client metrics.

Difference from Apache Kafka: brokers have no configurable loggers, so their resource type is refused with UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.config_commands import ConfigCommands, ConfigResource, ResourceKind
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_core.errors import Invalid

_ACCESS: Final = Access(Operation.DESCRIBE_CONFIGS, Resource.CLUSTER)


async def handle(context: RequestContext, request: Any, *, config_commands: ConfigCommands, permissions: Permissions) -> Any:
    kinds = frozenset(getattr(request, "resource_types", (ResourceKind.CLIENT_METRICS,)))
    error, found = ErrorCode.none, list[ConfigResource]()
    if not permissions.allows_cluster(context, _ACCESS.operation):
        error = ErrorCode.cluster_authorization_failed
    else:
        try:
            found = list(config_commands.resources(kinds))
        except Invalid:
            error = ErrorCode.unsupported_version
    rows = (context.new("ConfigResource", resource_name=one.name, resource_type=one.kind) for one in found)
    return context.new("ListConfigResourcesResponse", error_code=error, config_resources=tuple(rows))


API: Final = HandlerInfo(key=74, min_version=0, max_version=1, handle=handle, access=_ACCESS)
