"""AlterConfigs, versions 0–2: replace all configs of a topic, or all cluster-wide defaults. Kept for older tools.

Resources: topics (type 2), and the broker with the empty name (type 4), which is the defaults of all topics. Where it differs
from Apache Kafka: settings of a single broker are given when it starts and cannot be altered, and
internal topics only as ``topic_configs.py`` allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.topic_defaults import configure_defaults
from stratalog_broker.admin.topics import EditConfigs, TopicCommands
from stratalog_broker.configs.topic_configs import topic_config_name
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_core.errors import StratalogError

TOPIC: Final = 2
BROKER: Final = 4
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
        return {name_in(resource, row.name): row.value for row in resource.configs if row.value is not None}

    return edit


def name_in(resource: Any, name: str) -> str:
    """The name under which a config of the resource is stored: defaults may be given under Kafka's names for brokers."""
    return topic_config_name(name) if resource.resource_type == BROKER else name


async def alter(context: RequestContext, resource: Any, edit: EditConfigs, *, validate_only: bool) -> Any:
    """Answer one resource of an alter request, whose change of configs is ``edit``."""
    error, message = ErrorCode.none, None
    try:
        await _alter(context, resource, edit, validate_only=validate_only)
    except KafkaError as refused:
        error, message = refused.code, refused.message
    except StratalogError as failure:
        error, message = error_code_of(failure), failure.message
    return context.new(
        "AlterConfigsResourceResponse",
        error_code=error, error_message=message, resource_type=resource.resource_type, resource_name=resource.resource_name,
    )  # fmt: skip


async def _alter(context: RequestContext, resource: Any, edit: EditConfigs, *, validate_only: bool) -> None:
    names = [name_in(resource, row.name) for row in resource.configs]
    if len(set(names)) != len(names):
        raise KafkaError(ErrorCode.invalid_request, "a config is named twice")
    kind, name = resource.resource_type, resource.resource_name
    if kind == TOPIC:
        await TopicCommands(context.services).configure(name, edit, TIMEOUT_S, validate_only=validate_only)
    elif kind == BROKER and not name:
        await configure_defaults(context.services.metadata, edit, TIMEOUT_S, validate_only=validate_only)
    elif kind == BROKER:
        text = f"settings of broker {name[:20]} are given when it starts; alter the cluster's defaults (an empty name) instead"
        raise KafkaError(ErrorCode.invalid_request, text)
    else:
        text = f"configs of resource type {kind} are not served; 2 (topic) and 4 (broker) are"
        raise KafkaError(ErrorCode.invalid_request, text)


API: Final = HandlerInfo(key=33, min_version=0, max_version=2, handle=handle)
