"""AlterConfigs, versions 0–2: replaces all configs of a topic, or all cluster-wide defaults. Served for older tools.

Resources: topics (type 2), and the broker with the empty name (type 4), which means the defaults of all topics.
Differences from Apache Kafka: a single broker's settings are set at its start and cannot be altered; configs of internal
topics can be altered only as ``topic_configs.py`` allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stratalog_broker.admin.config_changes import ConfigChanges, stored_name
from stratalog_broker.admin.topics import EditConfigs
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo


async def handle(context: RequestContext, request: Any, *, changes: ConfigChanges) -> Any:
    rows = [
        context.new(
            "AlterConfigsResourceResponse",
            **await changes.apply(resource, _replacement(resource), validate_only=request.validate_only),
        )
        for resource in request.resources
    ]
    return context.new("AlterConfigsResponse", responses=tuple(rows))


def _replacement(resource: Any) -> EditConfigs:
    def edit(_: Mapping[str, str]) -> Mapping[str, str]:
        # A null value resets the config to its default, like omitting it.
        return {stored_name(resource, row.name): row.value for row in resource.configs if row.value is not None}

    return edit


API: Final = HandlerInfo(
    key=33, min_version=0, max_version=2, handle=handle, access=Access(Operation.ALTER_CONFIGS, Resource.TOPIC)
)
