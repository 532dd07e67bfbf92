"""DescribeProducers (key 61), version 0: the producers of partitions that this broker owns, with their open transactions.

``kafka-transactions.sh find-hanging`` looks here for transactions that their coordinators do not know. A producer that has
sent nothing since its last marker raised its epoch has no last sequence and no last timestamp: both are -1.

Difference from Apache Kafka: a partition that the request repeats is answered INVALID_REQUEST from the second time on.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.leadership import why_not_here
from stratalog_broker.requests.permissions import Permissions
from stratalog_broker.requests.repeated_names import first_or_repeated

_ACCESS: Final = Access(Operation.READ, Resource.TOPIC)


async def handle(context: RequestContext, request: Any, *, partitions: Partitions, permissions: Permissions) -> Any:
    denied = permissions.denied(context, _ACCESS, (topic.name for topic in request.topics))
    names = first_or_repeated((topic.name, index) for topic in request.topics for index in topic.partition_indexes)
    topics = []
    for topic in request.topics:
        rows = []
        for (_, index), is_repeated in islice(names, len(topic.partition_indexes)):
            log = partitions.find_by_name(topic.name.encode(), index)
            if is_repeated:
                rows.append(_row(context, index, ErrorCode.invalid_request))
            elif topic.name in denied:
                rows.append(_row(context, index, ErrorCode.topic_authorization_failed))
            elif log is None or log.is_releasing:
                rows.append(_row(context, index, why_not_here(partitions, topic.name, index)))
            else:
                rows.append(_row(context, index, ErrorCode.none, _producers(context, log)))
        topics.append(context.new("TopicResponse", name=topic.name, partitions=tuple(rows)))
    return context.new("DescribeProducersResponse", topics=tuple(topics))


def _row(context: RequestContext, index: int, code: ErrorCode, producers: tuple[Any, ...] = ()) -> Any:
    return context.new("PartitionResponse", partition_index=index, error_code=code, active_producers=producers)


def _producers(context: RequestContext, log: PartitionLog) -> tuple[Any, ...]:
    core = log.core
    first_offsets = core.appended_transactions.first_offsets
    return tuple(
        context.new(
            "ProducerState",
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            last_sequence=producer.batches[-1].last_sequence if producer.batches else -1,
            last_timestamp=producer.batches[-1].timestamp_ms if producer.batches else -1,
            coordinator_epoch=producer.coordinator_epoch,
            current_txn_start_offset=first_offsets.get(producer.producer_id, -1),
        )
        for producer in core.producers.snapshot()
    )


API: Final = HandlerInfo(key=61, min_version=0, max_version=0, handle=handle, access=_ACCESS)
