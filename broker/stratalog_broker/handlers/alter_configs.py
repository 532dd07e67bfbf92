"""AlterConfigs, versions 0–2: replace all configs of a topic. Kept for older tools; IncrementalAlterConfigs is the better way.

Where it differs from Apache Kafka: only topics can be altered, and internal ones only as ``topic_configs.py`` allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.context import RequestContext
from stratalog_broker.handlers.info import HandlerInfo
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_broker.topics import EditConfigs, TopicCommands
from stratalog_core.errors import StratalogError

TOPIC: Final = 2
TIMEOUT_S: Final = 10.0


async def handle(context: RequestContext, request: Any) -> Any:
    rows = [
        await alter(context, resource, _replacement(resource), validate_only=request.validate_only)
        for resource in request.resources
    ]
    return context.new("AlterConfigsResponse", responses=tuple(rows))


def _replacement(resource: Any) -> EditConfigs:
    def edit(_: Mapping[str, str]) -> Mapping[str, str]:
        # A null value means "back to the default", which is the same as not naming it.
        return {row.name: row.value for row in resource.configs if row.value is not None}

    return edit


async def alter(context: RequestContext, resource: Any, edit: EditConfigs, *, validate_only: bool) -> Any:
    """Answer one resource of an alter request, whose change of configs is ``edit``."""
    error, message = ErrorCode.none, None
    try:
        _check_resource(resource)
        commands = TopicCommands(context.services)
        await commands.configure(resource.resource_name, edit, TIMEOUT_S, validate_only=validate_only)
    except KafkaError as refused:
        error, message = refused.code, refused.message
    except StratalogError as failure:
        error, message = error_code_of(failure), failure.message
    return context.new(
        "AlterConfigsResourceResponse",
        error_code=error, error_message=message, resource_type=resource.resource_type, resource_name=resource.resource_name,
    )  # fmt: skip


def _check_resource(resource: Any) -> None:
    if resource.resource_type != TOPIC:
        text = f"configs of resource type {resource.resource_type} cannot be altered; broker settings are given at start"
        raise KafkaError(ErrorCode.invalid_request, text)
    names = [row.name for row in resource.configs]
    if len(set(names)) != len(names):
        raise KafkaError(ErrorCode.invalid_request, "a config is named twice")


API: Final = HandlerInfo(key=33, min_version=0, max_version=2, handle=handle)
