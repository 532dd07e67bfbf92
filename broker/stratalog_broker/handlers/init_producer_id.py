"""InitProducerId (key 22), versions 0–5: ids for idempotent and transactional producers (KIP-98, KIP-360).

Every call without a transactional id gets a new id with epoch 0, as in Kafka, even a call that asks to raise the epoch of an
existing id. A client that may write any topic gets one (KIP-679). A call with a transactional id ends what the id's former
producer has begun, fences it, and gets the id's next epoch.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.cluster.producer_ids import ProducerIds
from stratalog_broker.coordination.transactions.core.coordinator import ProducerEpoch
from stratalog_broker.coordination.transactions.core.transaction import NO_EPOCH, NO_PRODUCER_ID
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.protocol.durations import milliseconds
from stratalog_broker.protocol.errors import KafkaError, error_code_of
from stratalog_broker.protocol.transaction_errors import known_to
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import WRITE_TOPIC, Permissions
from stratalog_core.errors import Retriable, StratalogError

_KEY: Final = 22
_FENCED_SINCE: Final = 4
_TRANSACTION_ACCESS: Final = Access(Operation.WRITE, Resource.TRANSACTIONAL_ID)


async def handle(
    context: RequestContext,
    request: Any,
    *,
    producer_ids: ProducerIds,
    transactions: TransactionService,
    permissions: Permissions,
) -> Any:
    if request.transactional_id is not None:
        producer = await _begin_epoch(context, request, transactions, permissions)
    else:
        producer = await _new_id(context, producer_ids, permissions)
    if isinstance(producer, ErrorCode):
        error = known_to(producer, context.api_version, _FENCED_SINCE)
        return context.new("InitProducerIdResponse", error_code=error, producer_id=-1, producer_epoch=-1)
    producer_id, epoch = producer
    return context.new("InitProducerIdResponse", error_code=ErrorCode.none, producer_id=producer_id, producer_epoch=epoch)


async def _new_id(context: RequestContext, producer_ids: ProducerIds, permissions: Permissions) -> ProducerEpoch | ErrorCode:
    """Return an unused producer id, or why there is none."""
    may_write = permissions.allows_cluster(context, Operation.IDEMPOTENT_WRITE) or permissions.allows_some(context, WRITE_TOPIC)
    if not may_write:
        return ErrorCode.cluster_authorization_failed
    try:
        return ProducerEpoch(await producer_ids.take(), 0)
    except StratalogError as failure:
        # Every client retries on COORDINATOR_NOT_AVAILABLE.
        return ErrorCode.coordinator_not_available if isinstance(failure, Retriable) else error_code_of(failure)


async def _begin_epoch(
    context: RequestContext, request: Any, transactions: TransactionService, permissions: Permissions
) -> ProducerEpoch | ErrorCode:
    """Return the next epoch of a transactional id, or why there is none."""
    producer_id, epoch = getattr(request, "producer_id", NO_PRODUCER_ID), getattr(request, "producer_epoch", NO_EPOCH)
    if (producer_id == NO_PRODUCER_ID) != (epoch == NO_EPOCH):
        return ErrorCode.invalid_request
    expected = None if producer_id == NO_PRODUCER_ID else ProducerEpoch(producer_id, epoch)
    timeout_ms = milliseconds(request.transaction_timeout)
    try:
        permissions.check_transactional_id(context, _TRANSACTION_ACCESS, request.transactional_id)
        return await transactions.init_producer_id(request.transactional_id, timeout_ms, expected)
    except KafkaError as refused:
        return refused.code


API: Final = HandlerInfo(
    key=_KEY, min_version=0, max_version=5, handle=handle, access=Access(Operation.IDEMPOTENT_WRITE, Resource.CLUSTER)
)
