"""Planted faults of transaction coordinators: decisions, epochs, markers, offsets in transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from kio.schema.errors import ErrorCode
from msgspec.structs import replace

from stratalog_broker.coordination.groups.core.pending_offsets import PendingOffsets
from stratalog_broker.coordination.transaction_verification import Transaction as AskedTransaction
from stratalog_broker.coordination.transaction_verification import TransactionVerifier
from stratalog_broker.coordination.transactions import application, deferral
from stratalog_broker.coordination.transactions.application import TransactionApplication
from stratalog_broker.coordination.transactions.core.coordinator import Planned, ProducerEpoch, TransactionCoordinator
from stratalog_broker.coordination.transactions.core.marker_queue import MarkerQueue
from stratalog_broker.coordination.transactions.core.transaction import NO_PRODUCER_ID, PREPARED, Transaction
from stratalog_broker.coordination.wake_times import Instant
from stratalog_broker.handlers import txn_offset_commit
from stratalog_metadata.client.api import MetadataClient

LATE_S: Final = 0.5
"""Time for the markers to reach their partitions."""


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def decisions_are_written_after_their_markers() -> None:
    """A coordinator sends the markers of a transaction, and only then writes the decision."""
    begin: Callable[..., None] = TransactionApplication._begin

    def early(self: TransactionApplication, planned: Transaction, then: Any) -> None:
        if planned.state in PREPARED:
            self._continue(planned)
            asyncio.get_running_loop().call_later(LATE_S, begin, self, planned, then)
        else:
            begin(self, planned, then)

    _swap(TransactionApplication, "_begin", early)


def producers_keep_their_epoch() -> None:
    """InitProducerId gives an instance the epoch of the one before it."""
    initialized: Callable[..., Transaction] = Transaction.initialized

    def same(self: Transaction, epoch: int, last_epoch: int, timeout_ms: int, now_ms: int) -> Transaction:
        return initialized(self, self.producer_epoch, last_epoch, timeout_ms, now_ms)

    _swap(Transaction, "initialized", same)


def failed_markers_are_forgotten() -> None:
    """A coordinator counts a marker as written whatever the answer."""
    answered: Callable[..., Any] = MarkerQueue.answered

    def all_written(self: MarkerQueue, broker: int, written: Any) -> Any:
        return answered(self, broker, self._under_way[broker])

    _swap(MarkerQueue, "answered", all_written)


def decided_transactions_are_not_continued() -> None:
    """A coordinator that takes over does not send the markers of transactions that its predecessor decided."""
    start: Callable[..., None] = TransactionApplication.__init__

    def without(self: TransactionApplication, *args: Any) -> None:
        prepared = _swap(application, "PREPARED", frozenset())
        try:
            start(self, *args)
        finally:
            _swap(application, "PREPARED", prepared)

    _swap(TransactionApplication, "__init__", without)


def aborted_offsets_take_effect() -> None:
    """An abort marker commits the offsets of its transaction."""
    ended: Callable[..., Any] = PendingOffsets.ended
    _swap(PendingOffsets, "ended", lambda self, producer_id, *, commit: ended(self, producer_id, commit=True))


def transactions_keep_their_epoch() -> None:
    """The end of a transaction of version 2 does not raise its producer's epoch."""
    prepared: Callable[..., Transaction] = Transaction.prepared

    def same(self: Transaction, **fields: Any) -> Transaction:
        after = prepared(self, **fields)
        return replace(after, producer_epoch=self.producer_epoch, last_producer_epoch=self.last_producer_epoch)

    _swap(Transaction, "prepared", same)


def implicit_partitions_are_not_added() -> None:
    """A batch of transaction version 2 is appended without its coordinator's confirmation."""
    ask: Callable[..., Any] = TransactionVerifier._ask_once

    async def confirmed(self: TransactionVerifier, transaction: AskedTransaction, questions: Any) -> Any:
        if not transaction.adds:
            return await ask(self, transaction, questions)
        return {question.place: ErrorCode.none for question in questions}

    _swap(TransactionVerifier, "_ask_once", confirmed)


def moved_groups_are_said_to_be_loading() -> None:
    """TxnOffsetCommit answers COORDINATOR_LOAD_IN_PROGRESS after the group's partition has moved to another broker."""
    code_for: Callable[..., ErrorCode] = txn_offset_commit._code_for

    def loading(code: ErrorCode, version: int) -> ErrorCode:
        return ErrorCode.coordinator_load_in_progress if code is ErrorCode.not_coordinator else code_for(code, version)

    _swap(txn_offset_commit, "_code_for", loading)


def epochs_are_checked_before_markers_are_written() -> None:
    """EndTxn of version 2 checks the producer's epoch first, which the decision of its last transaction has raised."""
    end: Callable[..., Planned] = TransactionCoordinator.end

    def checked(self: TransactionCoordinator, transactional_id: str, producer: ProducerEpoch, **fields: Any) -> Planned:
        known = self._store.transactions.get(transactional_id)
        is_ending = known is not None and known.state in PREPARED and known.bumps_epochs
        if known is not None and is_ending and producer.epoch != known.last_producer_epoch:
            return ErrorCode.producer_fenced
        return end(self, transactional_id, producer, **fields)

    _swap(TransactionCoordinator, "end", checked)


def other_outcomes_are_refused_before_markers_are_written() -> None:
    """EndTxn with the other outcome is final while the markers of the decided transaction are being written."""
    end: Callable[..., Planned] = TransactionCoordinator.end

    def refused(self: TransactionCoordinator, transactional_id: str, producer: ProducerEpoch, **fields: Any) -> Planned:
        known = self._store.transactions.get(transactional_id)
        if known is not None and known.state in PREPARED and known.is_commit is not fields["commit"]:
            return ErrorCode.invalid_txn_state
        return end(self, transactional_id, producer, **fields)

    _swap(TransactionCoordinator, "end", refused)


def timeouts_fence_producers() -> None:
    """A coordinator that aborts a transaction after its timeout raises the epoch of its producer by two."""
    abort: Callable[..., Transaction | None] = TransactionCoordinator._server_abort

    def fencing(
        self: TransactionCoordinator, transaction: Transaction, unused_id: int | None, now: Instant
    ) -> Transaction | None:
        return abort(self, transaction.fenced(), unused_id, now)

    _swap(TransactionCoordinator, "_server_abort", fencing)


def timeouts_at_the_last_epoch_fence_producers() -> None:
    """A coordinator that aborts a transaction after its timeout gives no other id to a producer whose epochs are exhausted."""
    abort: Callable[..., Transaction | None] = TransactionCoordinator._server_abort

    def fencing(
        self: TransactionCoordinator, transaction: Transaction, unused_id: int | None, now: Instant
    ) -> Transaction | None:
        if not transaction.is_epoch_exhausted:
            return abort(self, transaction, unused_id, now)
        return transaction.fenced().prepared(
            commit=False, client_version=self._version(), next_producer_id=NO_PRODUCER_ID, now_ms=now.wall_ms
        )

    _swap(TransactionCoordinator, "_server_abort", fencing)


def outcomes_in_deleted_topics_are_dropped() -> None:
    """A coordinator gives up the markers of partitions whose topic is deleted, although the topic can be restored."""

    async def drop(metadata: MetadataClient, deferred: object) -> None:
        pass

    _swap(deferral, "_put", drop)


IN_TRANSACTIONS: Final = (
    outcomes_in_deleted_topics_are_dropped,
    timeouts_at_the_last_epoch_fence_producers,
    timeouts_fence_producers,
    moved_groups_are_said_to_be_loading,
    epochs_are_checked_before_markers_are_written,
    other_outcomes_are_refused_before_markers_are_written,
    decisions_are_written_after_their_markers,
    producers_keep_their_epoch,
    failed_markers_are_forgotten,
    decided_transactions_are_not_continued,
    aborted_offsets_take_effect,
    transactions_keep_their_epoch,
    implicit_partitions_are_not_added,
)
