"""IncrementalAlterConfigs, versions 0–1 (KIP-339): edits configs of topics, or the cluster-wide defaults of topics.

Operations: set, delete, append and subtract. Resources are those of ``alter_configs.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.config_changes import ConfigChanges, stored_name
from stratalog_broker.admin.topics import EditConfigs
from stratalog_broker.configs.config_keys import ConfigKind, elements
from stratalog_broker.configs.topic_configs import topic_config_key
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_core.errors import Invalid

SET, DELETE, APPEND, SUBTRACT = range(4)


async def handle(context: RequestContext, request: Any, *, changes: ConfigChanges) -> Any:
    rows = [
        context.new(
            "AlterConfigsResourceResponse",
            **await changes.apply(resource, _changes(resource), validate_only=request.validate_only),
        )
        for resource in request.resources
    ]
    return context.new("IncrementalAlterConfigsResponse", responses=tuple(rows))


def _changes(resource: Any) -> EditConfigs:
    def edit(configs: dict[str, str]) -> Mapping[str, str]:
        for row in resource.configs:
            _apply(configs, stored_name(resource, row.name), row.config_operation, row.value)
        return configs

    return edit


def _apply(configs: dict[str, str], name: str, operation: int, value: str | None) -> None:
    if operation == DELETE:
        configs.pop(name, None)
        return
    if value is None:
        raise KafkaError(ErrorCode.invalid_config, f"config {name} has no value")
    if operation == SET:
        configs[name] = value
    elif operation in (APPEND, SUBTRACT):
        configs[name] = _edited_list(configs, name, operation, value)
    else:
        raise KafkaError(ErrorCode.invalid_request, f"config operation {operation} of {name}: 0 to 3 are known")


def _edited_list(configs: Mapping[str, str], name: str, operation: int, value: str) -> str:
    try:
        key = topic_config_key(name)
    except Invalid as unknown:
        raise KafkaError(ErrorCode.invalid_config, unknown.message) from unknown
    if key.kind is not ConfigKind.LIST:
        raise KafkaError(ErrorCode.invalid_config, f"config {name} is not a list: set it instead")
    present, given = elements(configs.get(name, key.default)), elements(value)
    if operation == APPEND:
        return ",".join([*present, *(part for part in given if part not in present)])
    return ",".join(part for part in present if part not in given)


API: Final = HandlerInfo(
    key=44, min_version=0, max_version=1, handle=handle, access=Access(Operation.ALTER_CONFIGS, Resource.TOPIC)
)
