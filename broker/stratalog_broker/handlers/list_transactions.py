"""ListTransactions, versions 0–2: the transactional ids that this broker coordinates, with filters (KIP-664, 994 and 1152)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.linear_pattern import LinearPattern
from stratalog_broker.coordination.transactions.core.transaction import NO_TIME_MS, Transaction, TransactionState
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_core.errors import Invalid
from stratalog_core.ports import Clock

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
_STATES: Final = {state.label for state in TransactionState}


async def handle(
    context: RequestContext, request: Any, *, transactions: TransactionService, clock: Clock, permissions: Permissions
) -> Any:
    if transactions.is_loading:
        return _refusal(context, ErrorCode.coordinator_load_in_progress)
    try:
        matches = _matcher(getattr(request, "transactional_id_pattern", None))
    except Invalid:
        return _refusal(context, ErrorCode.invalid_regular_expression)
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
        and matches(each.transactional_id)
        and permissions.allows(context, _ACCESS, each.transactional_id)
    )
    return context.new(
        "ListTransactionsResponse", error_code=ErrorCode.none, unknown_state_filters=unknown, transaction_states=rows
    )


def _refusal(context: RequestContext, code: ErrorCode) -> Any:
    return context.new("ListTransactionsResponse", error_code=code, unknown_state_filters=(), transaction_states=())


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    """Return whether an id matches the pattern as a whole; every one matches none. Raises ``Invalid``."""
    return LinearPattern(pattern).matches if pattern else lambda transactional_id: True


def _runs_for(transaction: Transaction, now_ms: int) -> int:
    """Return for how long the transaction has been running, in milliseconds; -1 without one."""
    return now_ms - transaction.started_at_ms if transaction.started_at_ms != NO_TIME_MS else -1


API: Final = HandlerInfo(key=66, min_version=0, max_version=2, handle=handle, access=_ACCESS)
