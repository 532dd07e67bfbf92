"""EndTxn, versions 0–5: responds when the decision is durable; the markers follow.

Since v5 (KIP-890) every transaction raises the producer's epoch, and the response has the id and epoch of the next one.
"""

from __future__ import annotations

from typing import Any, Final

from stratalog_broker.coordination.transactions.application import EndedTransaction
from stratalog_broker.coordination.transactions.core.coordinator import ProducerEpoch
from stratalog_broker.coordination.transactions.core.transaction import EPOCH_BUMP_VERSION
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.protocol.transaction_errors import known_to
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_ACCESS: Final = Access(Operation.WRITE, Resource.TRANSACTIONAL_ID)
_FENCED_SINCE: Final = 2
_BUMPS_SINCE: Final = 5


async def handle(context: RequestContext, request: Any, *, transactions: TransactionService, permissions: Permissions) -> Any:
    version = context.api_version
    try:
        permissions.check_transactional_id(context, _ACCESS, request.transactional_id)
        ended = await transactions.end(
            request.transactional_id,
            ProducerEpoch(request.producer_id, request.producer_epoch),
            commit=request.committed,
            client_version=EPOCH_BUMP_VERSION if version >= _BUMPS_SINCE else 0,
        )
    except KafkaError as refused:
        ended = EndedTransaction(refused.code)
    return context.new(
        "EndTxnResponse",
        error_code=known_to(ended.error, version, _FENCED_SINCE),
        producer_id=ended.producer.producer_id,
        producer_epoch=ended.producer.epoch,
    )


API: Final = HandlerInfo(key=26, min_version=0, max_version=5, handle=handle, access=_ACCESS)
