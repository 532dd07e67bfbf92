"""ListTransactions, versions 0–1: the transactional ids that this broker coordinates, with filters (KIP-664, KIP-994).

Difference from Apache Kafka: version 2, which filters by a regular expression, is not served.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.transactions.core.transaction import NO_TIME_MS, Transaction, TransactionState
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_core.ports import Clock

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
_STATES: Final = {state.label for state in TransactionState}


async def handle(
    context: RequestContext, request: Any, *, transactions: TransactionService, clock: Clock, permissions: Permissions
) -> Any:
    if transactions.is_loading:
        loading = ErrorCode.coordinator_load_in_progress
        return context.new(
            "ListTransactionsResponse", error_code=loading, unknown_state_filters=(), transaction_states=()
        )  # fmt: skip
    unknown = tuple(name for name in request.state_filters if name not in _STATES)
    states = set(request.state_filters) - set(unknown)
    producer_ids = set(request.producer_id_filters)
    duration_ms = getattr(request, "duration_filter", -1)
    rows = tuple(
        context.new(
            "TransactionState",
            transactional_id=each.transactional_id,
            producer_id=each.producer_id,
            transaction_state=each.state.label,
        )
        for application in transactions.coordinators()
        for each in application.all()
        if (not producer_ids or each.producer_id in producer_ids)
        and (not request.state_filters or each.state.label in states)
        and (duration_ms < 0 or _runs_for(each, clock.wall_ms()) >= duration_ms)
        and permissions.allows(context, _ACCESS, each.transactional_id)
    )
    return context.new(
        "ListTransactionsResponse", error_code=ErrorCode.none, unknown_state_filters=unknown, transaction_states=rows
    )


def _runs_for(transaction: Transaction, now_ms: int) -> int:
    """Return for how long the transaction has been running, in milliseconds; -1 without one."""
    return now_ms - transaction.started_at_ms if transaction.started_at_ms != NO_TIME_MS else -1


API: Final = HandlerInfo(key=66, min_version=0, max_version=1, handle=handle, access=_ACCESS)
