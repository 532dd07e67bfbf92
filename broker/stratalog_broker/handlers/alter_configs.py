"""AlterConfigs, versions 0–2: replace all configs of a topic, or all cluster-wide defaults. Kept for older tools.

Resources: topics (type 2), and the broker with the empty name (type 4), which is the defaults of all topics. Where it differs
from Apache Kafka: settings of a single broker are given when it starts and cannot be altered, and
internal topics only as ``topic_configs.py`` allows.
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
        # A null value means "back to the default", which is the same as not naming it.
        return {stored_name(resource, row.name): row.value for row in resource.configs if row.value is not None}

    return edit


API: Final = HandlerInfo(
    key=33, min_version=0, max_version=2, handle=handle, access=Access(Operation.ALTER_CONFIGS, Resource.TOPIC)
)
