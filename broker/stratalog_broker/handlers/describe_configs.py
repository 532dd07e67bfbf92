"""DescribeConfigs, versions 1–4: topics (resource type 2), brokers (4), client metrics (16) and groups (32).

A broker named by its id returns its settings, which are read-only, and the topic defaults in force. The empty name returns
the cluster-wide defaults that were set. Differences from Apache Kafka: other resource types return INVALID_REQUEST; so does a
resource that the request repeats, from the second time on.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.config_commands import ConfigCommands, ConfigResource
from stratalog_broker.admin.config_rows import ConfigRow
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import admin_error_code_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_broker.requests.repeated_names import first_or_repeated
from stratalog_core.errors import StratalogError


async def handle(context: RequestContext, request: Any, *, config_commands: ConfigCommands, permissions: Permissions) -> Any:
    documented = getattr(request, "include_documentation", False)
    names = first_or_repeated((resource.resource_type, resource.resource_name) for resource in request.resources)
    results = tuple(
        _result(context, resource, ErrorCode.invalid_request, "the request lists the resource twice")
        if is_repeated
        else _describe(
            context, config_commands, permissions, resource, synonyms=request.include_synonyms, documented=documented
        )
        for resource, (_, is_repeated) in zip(request.resources, names, strict=True)
    )
    return context.new("DescribeConfigsResponse", results=results)


def _describe(
    context: RequestContext,
    config_commands: ConfigCommands,
    permissions: Permissions,
    resource: Any,
    *,
    synonyms: bool,
    documented: bool,
) -> Any:
    error, message, rows = ErrorCode.none, None, list[ConfigRow]()
    named = ConfigResource(resource.resource_type, resource.resource_name)
    try:
        if denied := permissions.config_denial(context, Operation.DESCRIBE_CONFIGS, *named):
            error, message = denied
        else:
            rows = config_commands.describe(named)
    except StratalogError as failure:
        error, message = admin_error_code_of(failure), failure.message
    wanted = resource.configuration_keys  # as in Kafka, an empty list asks for all configs, too
    configs = tuple(
        _config(context, row, synonyms=synonyms, documented=documented) for row in rows if not wanted or row.name in wanted
    )
    return _result(context, resource, error, message, configs)


def _result(
    context: RequestContext, resource: Any, error: ErrorCode, message: str | None, configs: tuple[Any, ...] = ()
) -> Any:
    return context.new(
        "DescribeConfigsResult",
        error_code=error, error_message=message, resource_type=resource.resource_type,
        resource_name=resource.resource_name, configs=configs,
    )  # fmt: skip


def _config(context: RequestContext, row: ConfigRow, *, synonyms: bool, documented: bool) -> Any:
    shown = row.synonyms if synonyms else ()
    return context.new(
        "DescribeConfigsResourceResult",
        name=row.name, value=row.value, read_only=row.read_only, config_source=row.source, is_sensitive=False,
        synonyms=tuple(
            context.new("DescribeConfigsSynonym", name=one.name, value=one.value, source=one.source) for one in shown
        ),
        config_type=row.kind, documentation=row.documentation if documented else None,
    )  # fmt: skip


API: Final = HandlerInfo(
    key=32, min_version=1, max_version=4, handle=handle, access=Access(Operation.DESCRIBE_CONFIGS, Resource.TOPIC)
)
