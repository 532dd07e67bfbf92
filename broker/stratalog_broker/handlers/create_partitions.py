"""CreatePartitions, versions 0–3: increases the number of a topic's partitions.

Differences from Apache Kafka: an assignment is an order of preferred owners (see ``create_topics.py``); internal topics
are refused, because the number of partitions determines which one a group belongs to.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.topic_limits import check_request
from stratalog_broker.admin.topics import PARTITIONS_MAX, TopicCommands
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Topic, topic_key


async def handle(
    context: RequestContext, request: Any, *, view: MetadataView, settings: BrokerSettings, topic_commands: TopicCommands
) -> Any:
    timeout_s = request_timeout_s(request.timeout)
    left = settings.request_partitions_max
    rows = []
    for wish in request.topics:
        topic = view.find(Topic, topic_key(wish.name))
        left -= max(min(wish.count, PARTITIONS_MAX) - topic.partition_count, 0) if topic is not None else 0
        rows.append(
            await _grow(context, view, settings, topic_commands, wish, timeout_s, left, validate_only=request.validate_only)
        )
    return context.new("CreatePartitionsResponse", results=tuple(rows))


async def _grow(
    context: RequestContext,
    view: MetadataView,
    settings: BrokerSettings,
    topic_commands: TopicCommands,
    wish: Any,
    timeout_s: float,
    left: int,
    *,
    validate_only: bool,
) -> Any:
    """Add one topic's partitions. ``left``: partitions that the request may still create afterwards; refused if negative."""
    error, message = ErrorCode.none, None
    try:
        if left < 0:
            check_request(settings, settings.request_partitions_max - left)
        await topic_commands.grow(wish.name, wish.count, timeout_s, assigned=_assigned(view, wish), validate_only=validate_only)
    except KafkaError as refused:
        error, message = refused.code, refused.message
    except StratalogError as failure:
        error, message = error_code_of(failure), failure.message
    return context.new("CreatePartitionsTopicResult", name=wish.name, error_code=error, error_message=message)


def _assigned(view: MetadataView, wish: Any) -> tuple[tuple[int, ...], ...]:
    """Return the brokers of each new partition; empty if the controller assigns them."""
    topic = view.find(Topic, topic_key(wish.name))
    if wish.assignments is None or topic is None:
        return ()
    added = wish.count - topic.partition_count
    assigned = tuple(tuple(row.broker_ids) for row in wish.assignments)
    if len(assigned) != added or any(len(brokers) != topic.replication_factor for brokers in assigned):
        text = (
            f"{len(assigned)} assignments for {added} new partitions of {topic.replication_factor} replicas: give one for each"
        )
        raise KafkaError(ErrorCode.invalid_replica_assignment, text)
    return assigned


API: Final = HandlerInfo(key=37, min_version=0, max_version=3, handle=handle, access=Access(Operation.ALTER, Resource.TOPIC))
