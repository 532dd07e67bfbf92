"""IncrementalAlterConfigs, versions 0–1 (KIP-339): edits configs of topics, or the cluster-wide defaults of topics.

Operations: set, delete, append and subtract. Resources are those of ``alter_configs.py``.
"""

from __future__ import annotations

from typing import Any, Final

from stratalog_broker.admin.config_commands import ConfigCommands, ConfigEdit, ConfigResource
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import outcome_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions


async def handle(context: RequestContext, request: Any, *, config_commands: ConfigCommands, permissions: Permissions) -> Any:
    rows = [await _edit(context, config_commands, permissions, one, request.validate_only) for one in request.resources]
    return context.new("IncrementalAlterConfigsResponse", responses=tuple(rows))


async def _edit(
    context: RequestContext, config_commands: ConfigCommands, permissions: Permissions, one: Any, validate_only: bool
) -> Any:
    resource = ConfigResource(one.resource_type, one.resource_name)
    edits = [ConfigEdit(row.name, row.config_operation, row.value) for row in one.configs]
    denied = permissions.config_denial(context, Operation.ALTER_CONFIGS, *resource)
    error, message = denied or await outcome_of(config_commands.edit(resource, edits, validate_only=validate_only))
    return context.new(
        "AlterConfigsResourceResponse",
        error_code=error, error_message=message, resource_type=resource.kind, resource_name=resource.name,
    )  # fmt: skip


API: Final = HandlerInfo(
    key=44, min_version=0, max_version=1, handle=handle, access=Access(Operation.ALTER_CONFIGS, Resource.TOPIC)
)
