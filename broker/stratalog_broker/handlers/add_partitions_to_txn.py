"""AddPartitionsToTxn, versions 0–5. Clients send v0–3; brokers send v4–5, several transactions at once (KIP-890).

Brokers either add partitions for clients that do not do so themselves, or ask whether a transaction has the partitions
(``verify_only``), before they append a batch to it.

Difference from Apache Kafka: of the partitions that a broker adds, those that exist are added, whether or not others are known
here. A topic may be new and this broker's view behind, and producers do not retry OPERATION_NOT_ATTEMPTED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.transactions.core.coordinator import ProducerEpoch
from stratalog_broker.coordination.transactions.core.transaction import EPOCH_BUMP_VERSION, PartitionName
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.protocol.transaction_errors import known_to
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import WRITE_TOPIC, Permissions
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Topic, topic_key

_ACCESS: Final = Access(Operation.WRITE, Resource.TRANSACTIONAL_ID)
_FENCED_SINCE: Final = 2
_BROKERS_SINCE: Final = 4
_ABORTABLE_SINCE: Final = 5
_ABSENT: Final = ErrorCode.unknown_topic_or_partition
_BROKER_FIELDS: Final = ("transactional_id", "producer_id", "producer_epoch", "topics")

Codes = Mapping[PartitionName, ErrorCode]


async def handle(
    context: RequestContext, request: Any, *, view: MetadataView, transactions: TransactionService, permissions: Permissions
) -> Any:
    if context.api_version < _BROKERS_SINCE:
        transactional_id, producer, names = _asked(request, "v3_and_below_")
        codes = await _add_for_client(context, view, transactions, permissions, transactional_id, producer, names)
        rows = _topic_results(context, codes)
        return context.new("AddPartitionsToTxnResponse", results_by_topic_v3_and_below=rows)
    if not permissions.allows_cluster(context, Operation.CLUSTER_ACTION):
        denied = ErrorCode.cluster_authorization_failed
        return context.new("AddPartitionsToTxnResponse", error_code=denied, results_by_transaction=())
    found = await asyncio.gather(*(_of_broker(context, view, transactions, each) for each in request.transactions))
    results = tuple(
        context.new(
            "AddPartitionsToTxnResult", transactional_id=each.transactional_id, topic_results=_topic_results(context, codes)
        )
        for each, codes in zip(request.transactions, found, strict=True)
    )
    return context.new("AddPartitionsToTxnResponse", error_code=ErrorCode.none, results_by_transaction=results)


def _asked(row: Any, prefix: str = "") -> tuple[str, ProducerEpoch, list[PartitionName]]:
    """Return transactional id, producer and partitions of a request, or of one of its transactions."""
    transactional_id, producer_id, epoch, topics = (getattr(row, prefix + field) for field in _BROKER_FIELDS)
    names = [(topic.name, index) for topic in topics for index in topic.partitions]
    return transactional_id, ProducerEpoch(producer_id, epoch), names


async def _add_for_client(
    context: RequestContext,
    view: MetadataView,
    transactions: TransactionService,
    permissions: Permissions,
    transactional_id: str,
    producer: ProducerEpoch,
    names: Sequence[PartitionName],
) -> Codes:
    """Add all partitions or none: one that is refused leaves the others not attempted."""
    if not permissions.allows(context, _ACCESS, transactional_id):
        return dict.fromkeys(names, ErrorCode.transactional_id_authorization_failed)
    denied = permissions.denied(context, WRITE_TOPIC, (name for name, _ in names))
    refused = {
        name: ErrorCode.topic_authorization_failed if name[0] in denied else _ABSENT
        for name in names
        if name[0] in denied or not _is_client_topic(view, name)
    }
    if refused:
        return {name: refused.get(name, ErrorCode.operation_not_attempted) for name in names}
    error = await _add(transactions, transactional_id, producer, names, client_version=0)
    return dict.fromkeys(names, known_to(error, context.api_version, _FENCED_SINCE))


async def _of_broker(context: RequestContext, view: MetadataView, transactions: TransactionService, row: Any) -> Codes:
    """Add or verify the partitions of one transaction, as another broker asks."""
    transactional_id, producer, names = _asked(row)
    if row.verify_only:
        missing = ErrorCode.transaction_abortable if context.api_version >= _ABORTABLE_SINCE else ErrorCode.invalid_txn_state
        return _verified(transactions, transactional_id, producer, names, missing)
    known = [name for name in names if _topic(view, name) is not None]
    error = await _add(transactions, transactional_id, producer, known, client_version=EPOCH_BUMP_VERSION) if known else _ABSENT
    return {**dict.fromkeys(names, _ABSENT), **dict.fromkeys(known, error)}


def _verified(
    transactions: TransactionService,
    transactional_id: str,
    producer: ProducerEpoch,
    names: Sequence[PartitionName],
    missing: ErrorCode,
) -> Codes:
    try:
        known = transactions.coordinator_of(transactional_id).coordinator.verify(transactional_id, producer)
    except KafkaError as refused:
        known = refused.code
    if isinstance(known, ErrorCode):
        return dict.fromkeys(names, known)
    partitions = frozenset(known.partitions)
    return {name: ErrorCode.none if name in partitions else missing for name in names}


async def _add(
    transactions: TransactionService,
    transactional_id: str,
    producer: ProducerEpoch,
    names: Sequence[PartitionName],
    *,
    client_version: int,
) -> ErrorCode:
    try:
        return await transactions.add_partitions(transactional_id, producer, frozenset(names), client_version)
    except KafkaError as refused:
        return refused.code


def _topic(view: MetadataView, name: PartitionName) -> Topic | None:
    """Return the topic of an existing partition."""
    topic = view.find(Topic, topic_key(name[0]))
    return topic if topic is not None and 0 <= name[1] < topic.partition_count else None


def _is_client_topic(view: MetadataView, name: PartitionName) -> bool:
    topic = _topic(view, name)
    return topic is not None and not topic.internal


def _topic_results(context: RequestContext, codes: Codes) -> tuple[Any, ...]:
    topics: dict[str, list[Any]] = {}
    for (topic, index), code in codes.items():
        row = context.new("AddPartitionsToTxnPartitionResult", partition_index=index, partition_error_code=code)
        topics.setdefault(topic, []).append(row)
    return tuple(
        context.new("AddPartitionsToTxnTopicResult", name=topic, results_by_partition=tuple(rows))
        for topic, rows in topics.items()
    )


API: Final = HandlerInfo(key=24, min_version=0, max_version=5, handle=handle, access=_ACCESS)
