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
from stratalog_broker.admin.topic_limits import check_cluster, check_request
from stratalog_broker.admin.topics import BROKER_DEFAULT, PARTITIONS_MAX, NewTopic, TopicCommands
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Topic


async def handle(
    context: RequestContext, request: Any, *, view: MetadataView, settings: BrokerSettings, topic_commands: TopicCommands
) -> Any:
    try:
        _check_limits(view, settings, request.topics)
    except KafkaError as refused:
        rows = [_refused(context, topic.name, refused.code, refused.message) for topic in request.topics]
        return context.new("CreateTopicsResponse", topics=tuple(rows))
    times = Counter(topic.name for topic in request.topics)
    timeout_s = request_timeout_s(request.timeout)
    rows = await asyncio.gather(
        *(
            _create(context, view, topic_commands, topic, timeout_s, validate_only=request.validate_only)
            for topic in request.topics
            if times[topic.name] == 1
        )
    )
    twice = [_refused(context, name, ErrorCode.invalid_request, "named twice") for name, count in times.items() if count > 1]
    return context.new("CreateTopicsResponse", topics=(*rows, *twice))


def _check_limits(view: MetadataView, settings: BrokerSettings, topics: Any) -> None:
    """Raise ``KafkaError`` POLICY_VIOLATION if the topics together exceed a limit."""
    default = settings.default_partitions
    partitions = sum(
        len(topic.assignments)
        or (default if topic.num_partitions == BROKER_DEFAULT else min(max(topic.num_partitions, 0), PARTITIONS_MAX))
        for topic in topics
    )
    check_request(settings, partitions)
    if len(topics) > 1:  # a single topic is checked together with its other properties
        check_cluster(settings, view, len(topics), partitions)


async def _create(
    context: RequestContext,
    view: MetadataView,
    topic_commands: TopicCommands,
    wish: Any,
    timeout_s: float,
    *,
    validate_only: bool,
) -> Any:
    try:
        topic = await topic_commands.create(_new_topic(wish), timeout_s, validate_only=validate_only)
    except KafkaError as refused:
        return _refused(context, wish.name, refused.code, refused.message)
    except StratalogError as failure:
        return _refused(context, wish.name, error_code_of(failure), failure.message)
    return context.new(
        "CreatableTopicResult",
        name=topic.name, topic_id=topic.topic_id, error_code=ErrorCode.none, error_message=None,
        num_partitions=topic.partition_count, replication_factor=topic.replication_factor,
        configs=_configs(context, view, topic),
    )  # fmt: skip


def _new_topic(wish: Any) -> NewTopic:
    configs = {row.name: row.value for row in wish.configs}
    unset = [name for name, value in configs.items() if value is None]
    if unset:
        raise KafkaError(ErrorCode.invalid_config, f"config {unset[0]} has no value")
    partition_count, replication_factor = wish.num_partitions, wish.replication_factor
    if wish.assignments:
        if partition_count != BROKER_DEFAULT or replication_factor != BROKER_DEFAULT:
            raise KafkaError(ErrorCode.invalid_request, "give either a replica assignment, or numbers, not both")
        assigned = _assigned(wish.assignments)
        return NewTopic(
            name=wish.name, partition_count=len(assigned), replication_factor=len(assigned[0]), configs=configs,
            assigned=assigned,
        )  # fmt: skip
    return NewTopic(name=wish.name, partition_count=partition_count, replication_factor=replication_factor, configs=configs)


def _assigned(assignments: Any) -> tuple[tuple[int, ...], ...]:
    """Return the brokers of each partition of a manual assignment."""
    rows = {row.partition_index: tuple(row.broker_ids) for row in assignments}
    factors = {len(brokers) for brokers in rows.values()}
    if sorted(rows) != list(range(len(assignments))) or len(factors) != 1:
        text = "replica assignment: number the partitions from 0 without gaps, with equally many replicas each"
        raise KafkaError(ErrorCode.invalid_replica_assignment, text)
    return tuple(rows[index] for index in range(len(rows)))


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


API: Final = HandlerInfo(key=19, min_version=2, max_version=7, handle=handle, access=Access(Operation.CREATE, Resource.TOPIC))
