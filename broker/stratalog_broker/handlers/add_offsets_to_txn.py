"""AddOffsetsToTxn, versions 0–4: adds the partition of a group's offsets to a transaction.

Clients of ``transaction.version`` 2 do not send it: TxnOffsetCommit adds the partition itself.
"""

from __future__ import annotations

from typing import Any, Final

from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.coordination.transactions.core.coordinator import ProducerEpoch
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.protocol.transaction_errors import known_to
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions

_ACCESS: Final = Access(Operation.WRITE, Resource.TRANSACTIONAL_ID)
_GROUP_ACCESS: Final = Access(Operation.READ, Resource.GROUP)
_GROUP_KEY_TYPE: Final = 0
_FENCED_SINCE: Final = 2


async def handle(
    context: RequestContext,
    request: Any,
    *,
    transactions: TransactionService,
    locator: CoordinatorLocator,
    permissions: Permissions,
) -> Any:
    try:
        permissions.check_transactional_id(context, _ACCESS, request.transactional_id)
        permissions.check_group(context, _GROUP_ACCESS, request.group_id)
        # The group need not exist: a producer that only sends its offsets asks for the group's coordinator after this.
        offsets = await locator.created_partition(_GROUP_KEY_TYPE, request.group_id)
        error = await transactions.add_partitions(
            request.transactional_id,
            ProducerEpoch(request.producer_id, request.producer_epoch),
            frozenset((offsets,)),
            client_version=0,
        )
    except KafkaError as refused:
        error = refused.code
    return context.new("AddOffsetsToTxnResponse", error_code=known_to(error, context.api_version, _FENCED_SINCE))


API: Final = HandlerInfo(key=25, min_version=0, max_version=4, handle=handle, access=_ACCESS)
