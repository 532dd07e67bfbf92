"""DescribeTransactions, version 0: the state of transactional ids that this broker coordinates (KIP-664).

Difference from Apache Kafka: an id that the request repeats is answered INVALID_REQUEST from the second time on.
"""

from __future__ import annotations

import datetime
import itertools
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.transactions.core.transaction import Transaction
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import DESCRIBE_TOPIC, Permissions
from stratalog_broker.requests.repeated_names import first_or_repeated

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
_EPOCH: Final = datetime.datetime.fromtimestamp(0, datetime.UTC)


async def handle(context: RequestContext, request: Any, *, transactions: TransactionService, permissions: Permissions) -> Any:
    rows = tuple(
        _row(context, each, ErrorCode.invalid_request) if is_repeated else _describe(context, transactions, permissions, each)
        for each, is_repeated in first_or_repeated(request.transactional_ids)
    )
    return context.new("DescribeTransactionsResponse", transaction_states=rows)


def _describe(
    context: RequestContext, transactions: TransactionService, permissions: Permissions, transactional_id: str
) -> Any:
    try:
        permissions.check_transactional_id(context, _ACCESS, transactional_id)
        if not transactional_id:
            raise KafkaError(ErrorCode.invalid_request)
        found = transactions.coordinator_of(transactional_id).find(transactional_id)
        if found is None:
            raise KafkaError(ErrorCode.transactional_id_not_found)
    except KafkaError as refused:
        return _row(context, transactional_id, refused.code)
    denied = permissions.denied(context, DESCRIBE_TOPIC, (topic for topic, _ in found.partitions))
    topics = tuple(
        context.new("TopicData", topic=topic, partitions=tuple(index for _, index in group))
        for topic, group in itertools.groupby(found.partitions, key=lambda name: name[0])
        if topic not in denied
    )
    return _row(context, transactional_id, ErrorCode.none, found, topics)


def _row(
    context: RequestContext,
    transactional_id: str,
    error: ErrorCode,
    found: Transaction | None = None,
    topics: tuple[Any, ...] = (),
) -> Any:
    """Return one row; numbers of a refused one are zero, as in Kafka."""
    return context.new(
        "TransactionState",
        error_code=error,
        transactional_id=transactional_id,
        transaction_state="" if found is None else found.state.label,
        transaction_timeout=datetime.timedelta(milliseconds=0 if found is None else found.timeout_ms),
        transaction_start_time=_EPOCH + datetime.timedelta(milliseconds=0 if found is None else found.started_at_ms),
        producer_id=0 if found is None else found.producer_id,
        producer_epoch=0 if found is None else found.producer_epoch,
        topics=topics,
    )


API: Final = HandlerInfo(key=65, min_version=0, max_version=0, handle=handle, access=_ACCESS)
