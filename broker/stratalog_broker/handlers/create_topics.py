"""CreateTopics, versions 2–7. Responds when the partitions have owners or the request times out.

Differences from Apache Kafka: only the cluster creates internal topics; a replica assignment gives the number of copies and
the preferred owners in order (the copies are on bookies); topic names that differ only in "." and "_" do not collide. The
topics of one request are created concurrently and independently; a request that exceeds a limit on topics or partitions is
refused as a whole, with POLICY_VIOLATION.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.config_rows import topic_config_rows
from stratalog_broker.admin.errors import LimitExceeded
from stratalog_broker.admin.topics import NewTopic, TopicCommands
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import admin_error_code_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions, denial
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Topic

_ACCESS: Final = Access(Operation.CREATE, Resource.TOPIC)
_DESCRIBE_CONFIGS: Final = Access(Operation.DESCRIBE_CONFIGS, Resource.TOPIC)


async def handle(
    context: RequestContext, request: Any, *, view: MetadataView, topic_commands: TopicCommands, permissions: Permissions
) -> Any:
    denied: frozenset[str] = frozenset()
    if not permissions.allows_cluster(context, Operation.CREATE):
        times = Counter(wish.name for wish in request.topics)
        denied = permissions.denied(context, _ACCESS, (name for name, count in times.items() if count == 1))
    wanted = [_new_topic(wish) for wish in request.topics if wish.name not in denied]
    answers = await _create_all(context, view, topic_commands, permissions, wanted, request)
    code = ErrorCode.topic_authorization_failed
    refused = [_refused(context, name, code, denial(context, _ACCESS, name)) for name in sorted(denied)]
    return context.new("CreateTopicsResponse", topics=(*answers, *refused))


async def _create_all(
    context: RequestContext,
    view: MetadataView,
    topic_commands: TopicCommands,
    permissions: Permissions,
    wanted: list[NewTopic],
    request: Any,
) -> list[Any]:
    try:
        topic_commands.check_limits(wanted)
    except LimitExceeded as refused:
        return [_refused(context, topic.name, admin_error_code_of(refused), refused.message) for topic in wanted]
    times = Counter(topic.name for topic in wanted)
    timeout_s = request_timeout_s(request.timeout)
    rows = await asyncio.gather(
        *(
            _create(context, view, topic_commands, permissions, topic, timeout_s, validate_only=request.validate_only)
            for topic in wanted
            if times[topic.name] == 1
        )
    )
    twice = [
        _refused(context, name, ErrorCode.invalid_request, "the request lists the topic twice")
        for name, count in times.items()
        if count > 1
    ]
    return [*rows, *twice]


def _new_topic(wish: Any) -> NewTopic:
    return NewTopic(
        name=wish.name, partition_count=wish.num_partitions, replication_factor=wish.replication_factor,
        configs={row.name: row.value for row in wish.configs},
        assigned=tuple((row.partition_index, tuple(row.broker_ids)) for row in wish.assignments),
    )  # fmt: skip


async def _create(
    context: RequestContext,
    view: MetadataView,
    topic_commands: TopicCommands,
    permissions: Permissions,
    new: NewTopic,
    timeout_s: float,
    *,
    validate_only: bool,
) -> Any:
    try:
        topic = await topic_commands.create(new, timeout_s, validate_only=validate_only)
    except StratalogError as failure:
        return _refused(context, new.name, admin_error_code_of(failure), failure.message)
    if not permissions.allows(context, _DESCRIBE_CONFIGS, topic.name):
        return context.new(
            "CreatableTopicResult",
            name=topic.name, topic_id=topic.topic_id, error_code=ErrorCode.none, error_message=None,
            topic_config_error_code=ErrorCode.topic_authorization_failed,
            num_partitions=-1, replication_factor=-1, configs=(),
        )  # fmt: skip
    return context.new(
        "CreatableTopicResult",
        name=topic.name, topic_id=topic.topic_id, error_code=ErrorCode.none, error_message=None,
        num_partitions=topic.partition_count, replication_factor=topic.replication_factor,
        configs=_configs(context, view, topic),
    )  # fmt: skip


def _configs(context: RequestContext, view: MetadataView, topic: Topic) -> tuple[Any, ...]:
    defaults = topic_defaults(view)
    return tuple(
        context.new(
            "CreatableTopicConfigs",
            name=row.name, value=row.value, read_only=False, config_source=row.source, is_sensitive=False,
        )
        for row in topic_config_rows(topic, defaults)
    )  # fmt: skip


def _refused(context: RequestContext, name: str, error: ErrorCode, message: str) -> Any:
    return context.new(
        "CreatableTopicResult",
        name=name, topic_id=None, error_code=error, error_message=message, num_partitions=-1, replication_factor=-1, configs=(),
    )  # fmt: skip


API: Final = HandlerInfo(key=19, min_version=2, max_version=7, handle=handle, access=_ACCESS)
