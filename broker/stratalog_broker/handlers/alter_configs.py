"""AlterConfigs, versions 0–2: replaces all configs of a topic, or all cluster-wide defaults. Served for older tools.

Resources: topics (type 2), and the broker with the empty name (type 4), which means the defaults of all topics.
Differences from Apache Kafka: a single broker's settings are set at its start and cannot be altered; configs of internal
topics can be altered only as ``topic_configs.py`` allows.
"""

from __future__ import annotations

from typing import Any, Final

from stratalog_broker.admin.config_commands import ConfigCommands, ConfigResource
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import outcome_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions


async def handle(context: RequestContext, request: Any, *, config_commands: ConfigCommands, permissions: Permissions) -> Any:
    rows = [await _replace(context, config_commands, permissions, one, request.validate_only) for one in request.resources]
    return context.new("AlterConfigsResponse", responses=tuple(rows))


async def _replace(
    context: RequestContext, config_commands: ConfigCommands, permissions: Permissions, one: Any, validate_only: bool
) -> Any:
    resource = ConfigResource(one.resource_type, one.resource_name)
    configs = [(row.name, row.value) for row in one.configs]
    denied = permissions.config_denial(context, Operation.ALTER_CONFIGS, *resource)
    error, message = denied or await outcome_of(config_commands.replace(resource, configs, validate_only=validate_only))
    return context.new(
        "AlterConfigsResourceResponse",
        error_code=error, error_message=message, resource_type=resource.kind, resource_name=resource.name,
    )  # fmt: skip


API: Final = HandlerInfo(
    key=33, min_version=0, max_version=2, handle=handle, access=Access(Operation.ALTER_CONFIGS, Resource.TOPIC)
)
