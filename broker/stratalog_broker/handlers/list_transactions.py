"""ListTransactions, versions 0–2: the transactional ids that this broker coordinates, with filters (KIP-664, 994 and 1152).

A coordinator has up to a hundred thousand ids, so a response is made in pieces, and the event loop runs between them. It
describes all transactions as they were when it was begun. One response is made at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.linear_pattern import LinearPattern
from stratalog_broker.coordination.transactions.core.transaction import NO_TIME_MS, Transaction, TransactionState
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.protocol.arrays import with_array
from stratalog_broker.protocol.entities import encode_response
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.encoded_array import EncodedArray
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import Permissions
from stratalog_core.errors import Invalid
from stratalog_core.ports import Clock

_ACCESS: Final = Access(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
_STATES: Final = {state.label for state in TransactionState}
_ROW_COST: Final = 1
_MATCHED_ROW_COST: Final = 8
"""A costly expression takes 0.1 ms to match (``configs/linear_pattern.py``)."""


class ListTransactionsHandler:
    """Handles all ListTransactions requests of the broker."""

    def __init__(self, *, transactions: TransactionService, clock: Clock, permissions: Permissions) -> None:
        self._transactions = transactions
        self._clock = clock
        self._permissions = permissions
        self._listing = asyncio.Lock()

    async def __call__(self, context: RequestContext, request: Any) -> Any:
        """Return the response, from the coordinators that are loaded when it is begun."""
        pattern = getattr(request, "transactional_id_pattern", None)
        try:
            matches = _matcher(pattern)
        except Invalid:
            matches = None
        async with self._listing:
            if self._transactions.is_loading:
                return _refusal(context, ErrorCode.coordinator_load_in_progress)
            if matches is None:
                return _refusal(context, ErrorCode.invalid_regular_expression)
            rows, now_ms = EncodedArray(_MATCHED_ROW_COST if pattern else _ROW_COST), self._clock.wall_ms()
            for each in [each for application in self._transactions.coordinators() for each in application.all()]:
                is_wanted = _passes(each, request, now_ms) and matches(each.transactional_id)
                is_wanted = is_wanted and self._permissions.allows(context, _ACCESS, each.transactional_id)
                await rows.add(_encoded(context, each) if is_wanted else None)
        unknown = tuple(name for name in request.state_filters if name not in _STATES)
        response = context.new(
            "ListTransactionsResponse", error_code=ErrorCode.none, unknown_state_filters=unknown, transaction_states=()
        )
        return with_array(encode_response(response), 1, rows.count, rows.join(), is_flexible=True)


def _passes(one: Transaction, request: Any, now_ms: int) -> bool:
    """Whether the transaction passes the filters, except the pattern of its id."""
    duration_ms = getattr(request, "duration_filter", -1)
    return (
        (not request.producer_id_filters or one.producer_id in request.producer_id_filters)
        and (not request.state_filters or one.state.label in request.state_filters)
        and (duration_ms < 0 or _runs_for(one, now_ms) >= duration_ms)
    )


def _encoded(context: RequestContext, one: Transaction) -> bytes:
    row = context.new(
        "TransactionState",
        transactional_id=one.transactional_id,
        producer_id=one.producer_id,
        transaction_state=one.state.label,
    )
    return encode_response(row)


def _refusal(context: RequestContext, code: ErrorCode) -> Any:
    return context.new("ListTransactionsResponse", error_code=code, unknown_state_filters=(), transaction_states=())


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    """Return whether an id matches the pattern as a whole; every one matches none. Raises ``Invalid``."""
    return LinearPattern(pattern).matches if pattern else lambda transactional_id: True


def _runs_for(transaction: Transaction, now_ms: int) -> int:
    """Return for how long the transaction has been running, in milliseconds; -1 without one."""
    return now_ms - transaction.started_at_ms if transaction.started_at_ms != NO_TIME_MS else -1


API: Final = HandlerInfo(key=66, min_version=0, max_version=2, handle=ListTransactionsHandler, access=_ACCESS)
