"""CreatePartitions, versions 0–3: raise the number of a topic's partitions.

Where it differs from Apache Kafka: an assignment is an order of preferred owners (see ``create_topics.py``); internal topics
are refused, because their number of partitions decides which of them a group belongs to.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.context import RequestContext
from stratalog_broker.handlers.info import HandlerInfo
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_broker.topics import TopicCommands
from stratalog_core.errors import StratalogError
from stratalog_metadata.records import Topic, topic_key


async def handle(context: RequestContext, request: Any) -> Any:
    timeout_s = request_timeout_s(request.timeout)
    rows = [await _grow(context, wish, timeout_s, validate_only=request.validate_only) for wish in request.topics]
    return context.new("CreatePartitionsResponse", results=tuple(rows))


async def _grow(context: RequestContext, wish: Any, timeout_s: float, *, validate_only: bool) -> Any:
    error, message = ErrorCode.none, None
    try:
        await TopicCommands(context.services).grow(
            wish.name, wish.count, timeout_s, assigned=_assigned(context, wish), validate_only=validate_only
        )
    except KafkaError as refused:
        error, message = refused.code, refused.message
    except StratalogError as failure:
        error, message = error_code_of(failure), failure.message
    return context.new("CreatePartitionsTopicResult", name=wish.name, error_code=error, error_message=message)


def _assigned(context: RequestContext, wish: Any) -> tuple[tuple[int, ...], ...]:
    """Brokers of each new partition; nothing if they are left to the controller."""
    topic = context.services.view.find(Topic, topic_key(wish.name))
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


API: Final = HandlerInfo(key=37, min_version=0, max_version=3, handle=handle)
