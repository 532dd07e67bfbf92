"""The transactional ids of one partition of ``__transaction_state``: which transitions are allowed. Does no I/O.

A request returns an error code, or the transaction to write. That write is pending until ``settled``; until then, and from the
decision of a transaction until its markers are written, other requests for the id get CONCURRENT_TRANSACTIONS, which clients
retry. A client of version 2 knows its next epoch, and perhaps its next id, from the decision on, before they are the
producer's; so that answer comes before any check of them. A write that fails while this broker still owns the partition had no
effect; one whose outcome is unknown ends the ownership, so the next coordinator decides by the log.

The rules are Kafka's (``TransactionCoordinator``): KIP-98, KIP-360 (a producer raises its own epoch), KIP-890 (every
transaction raises the epoch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.transactions.core.store import TransactionStore
from stratalog_broker.coordination.transactions.core.transaction import (
    EPOCH_BUMP_VERSION,
    EPOCH_MAX,
    NO_EPOCH,
    NO_PRODUCER_ID,
    PREPARED,
    PartitionName,
    TopicIds,
    Transaction,
    TransactionState,
)
from stratalog_broker.coordination.wake_times import Instant, WakeTimes

RETRY_MS: Final = 100
"""Pause before an abort after a time-out is tried again."""
NAME_BYTES_MAX: Final = 4_096
"""Maximum of a transactional id."""
PARTITIONS_MAX: Final = 10_000
"""Partitions of one transaction: its record must fit into one entry of a ledger."""
_COMPLETED: Final = {
    True: TransactionState.COMPLETE_COMMIT,
    False: TransactionState.COMPLETE_ABORT,
}
_IDLE: Final = frozenset({TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionLimits:
    """Ids that are not used for ``expiration_ms`` are removed."""

    timeout_ms_max: int = 900_000
    expiration_ms: int = 7 * 86_400_000
    transactional_ids_max: int = 100_000


class ProducerEpoch(NamedTuple):
    """A producer id with its epoch."""

    producer_id: int
    epoch: int


Planned = Transaction | ErrorCode
"""The transaction to write, or the answer without a write."""


class TransactionCoordinator:
    """See the module's header. ``store`` changes only by what has been written."""

    def __init__(
        self,
        limits: TransactionLimits,
        store: TransactionStore,
        now: Instant,
        version: Callable[[], int],
        spare_id: Callable[[], int | None],
    ) -> None:
        """The functions are for what the coordinator does on its own.

        ``version`` returns the cluster's ``transaction.version``, ``spare_id`` an unused producer id, or None for the moment.
        """
        self._limits = limits
        self._version = version
        self._spare_id = spare_id
        self._store = store
        self._pending: dict[str, Transaction] = {}
        self._deadlines: dict[str, int] = {}
        """When an ongoing transaction is aborted (monotonic milliseconds)."""
        self._wakes = WakeTimes()
        for transaction in store.transactions.values():
            if transaction.state is TransactionState.ONGOING:
                elapsed_ms = now.wall_ms - transaction.started_at_ms
                # A wall clock may have jumped: the rest is at most the whole timeout.
                rest_ms = min(max(transaction.timeout_ms - elapsed_ms, 0), transaction.timeout_ms)
                self._set_deadline(transaction.transactional_id, now.monotonic_ms + rest_ms)

    # -- requests

    def needs_producer_id(self, transactional_id: str) -> bool:
        """Return whether the next request may need an unused producer id: the id is new, or its epochs are exhausted."""
        known = self._store.transactions.get(transactional_id)
        return known is None or known.is_epoch_exhausted

    def init_producer_id(
        self, transactional_id: str, timeout_ms: int, expected: ProducerEpoch | None, unused_id: int | None, now: Instant
    ) -> Planned:
        """InitProducerId: begin a new epoch. If a transaction is ongoing, plan its abort; the client has to ask again.

        Difference from Apache Kafka: a producer that raises its epoch aborts only its own transaction. There, one that is
        fenced, or a late copy of a request, aborts the transaction of the present producer.
        """
        error = self._check_init(transactional_id, timeout_ms, expected)
        if error is not ErrorCode.none:
            return error
        known = self._store.transactions.get(transactional_id)
        if known is None:
            if unused_id is None:
                return ErrorCode.concurrent_transactions
            return self._plan(
                Transaction(
                    transactional_id=transactional_id, producer_id=unused_id, producer_epoch=0, timeout_ms=timeout_ms,
                    updated_at_ms=now.wall_ms,
                )
            )  # fmt: skip
        if known.state is TransactionState.ONGOING:
            if expected not in (None, ProducerEpoch(known.producer_id, known.producer_epoch)):
                return ErrorCode.producer_fenced
            abort = self._server_abort(known, unused_id, now)
            return ErrorCode.concurrent_transactions if abort is None else self._plan(abort)
        return self._next_epoch(known, timeout_ms, expected, unused_id, now)

    def _check_init(self, transactional_id: str, timeout_ms: int, expected: ProducerEpoch | None) -> ErrorCode:
        if not 0 < len(transactional_id.encode()) <= NAME_BYTES_MAX:
            return ErrorCode.invalid_request
        if not 0 < timeout_ms <= self._limits.timeout_ms_max:
            return ErrorCode.invalid_transaction_timeout
        if self._is_changing(transactional_id):
            return ErrorCode.concurrent_transactions
        known = self._store.transactions.get(transactional_id)
        if known is None:
            has_room = len(self._store.transactions) + len(self._pending) < self._limits.transactional_ids_max
            return ErrorCode.none if has_room else ErrorCode.coordinator_not_available
        if expected is not None and not _may_be_producer_of(known, expected):
            return ErrorCode.producer_fenced
        return ErrorCode.none

    def _next_epoch(
        self, known: Transaction, timeout_ms: int, expected: ProducerEpoch | None, unused_id: int | None, now: Instant
    ) -> Planned:
        is_current = expected is not None and expected.epoch == known.producer_epoch
        last_epoch = known.producer_epoch if is_current else NO_EPOCH
        if expected is not None and not is_current:
            if expected.epoch != known.last_producer_epoch:
                return ErrorCode.producer_fenced
            # A retry of a request that succeeded: a new producer would have cleared the last epoch.
            return self._plan(known.initialized(known.producer_epoch, known.last_producer_epoch, timeout_ms, now.wall_ms))
        if not known.is_epoch_exhausted:
            return self._plan(known.initialized(known.producer_epoch + 1, last_epoch, timeout_ms, now.wall_ms))
        if unused_id is None:
            return ErrorCode.concurrent_transactions
        return self._plan(known.with_new_producer_id(unused_id, last_epoch, timeout_ms, now.wall_ms))

    def add_partitions(
        self,
        transactional_id: str,
        producer: ProducerEpoch,
        added: frozenset[PartitionName],
        topic_ids: TopicIds,
        client_version: int,
        now: Instant,
    ) -> Planned:
        """AddPartitionsToTxn and AddOffsetsToTxn: return NONE if the transaction has all of the partitions.

        ``topic_ids`` are those of the partitions' topics that are not internal.
        """
        if self._is_changing(transactional_id):
            return ErrorCode.concurrent_transactions
        known = self._of_producer(transactional_id, producer)
        if isinstance(known, ErrorCode):
            return known
        is_ongoing = known.state is TransactionState.ONGOING
        if is_ongoing and added.issubset(known.partitions) and topic_ids.issubset(known.topic_ids):
            return ErrorCode.none
        if len(added) + (len(known.partitions) if is_ongoing else 0) > PARTITIONS_MAX:
            return ErrorCode.invalid_request
        return self._plan(known.with_partitions(added, topic_ids, client_version, now.wall_ms))

    def verify(self, transactional_id: str, producer: ProducerEpoch) -> Transaction | ErrorCode:
        """AddPartitionsToTxn with verify_only: return the transaction, or why the producer has none that takes batches."""
        known = self._of_producer(transactional_id, producer)
        if isinstance(known, ErrorCode):
            return known
        pending = self._pending.get(transactional_id)
        # A batch that is admitted while the outcome is being written might come after the marker.
        if known.state in PREPARED or (pending is not None and pending.state is not TransactionState.ONGOING):
            return ErrorCode.concurrent_transactions
        return known

    def _of_producer(self, transactional_id: str, producer: ProducerEpoch) -> Transaction | ErrorCode:
        """Return the id's transaction, or the code for a producer that is not its present one."""
        if not transactional_id:
            return ErrorCode.invalid_request
        known = self._store.transactions.get(transactional_id)
        if known is None or known.producer_id != producer.producer_id:
            return ErrorCode.invalid_producer_id_mapping
        return known if known.producer_epoch == producer.epoch else ErrorCode.producer_fenced

    def end(
        self,
        transactional_id: str,
        producer: ProducerEpoch,
        *,
        commit: bool,
        client_version: int,
        unused_id: int | None,
        now: Instant,
    ) -> Planned:
        """EndTxn: decide the outcome. NONE if it was decided so before."""
        if not transactional_id:
            return ErrorCode.invalid_request
        known = self._store.transactions.get(transactional_id)
        if known is None:
            return ErrorCode.invalid_producer_id_mapping
        bumps = client_version >= EPOCH_BUMP_VERSION
        if bumps and self._is_changing(transactional_id):
            return ErrorCode.concurrent_transactions
        error = _check_end_bumping(known, producer) if bumps else _check_end(known, producer)
        if error is not ErrorCode.none:
            return error
        if self._is_changing(transactional_id):
            return ErrorCode.concurrent_transactions
        is_retry = bumps and (_is_bumped_once(known, producer) or _has_overflowed(known, producer))
        begins = bumps and not commit and not is_retry and known.state in _IDLE
        if known.state is not TransactionState.ONGOING and not begins:
            return _ended_already(known, commit=commit, bumps=bumps, is_retry=is_retry)
        next_id = NO_PRODUCER_ID
        if bumps and known.is_epoch_exhausted:
            if unused_id is None:
                return ErrorCode.concurrent_transactions
            next_id = unused_id
        return self._plan(
            known.prepared(commit=commit, client_version=client_version, next_producer_id=next_id, now_ms=now.wall_ms)
        )

    # -- writes

    def is_pending(self, transactional_id: str) -> bool:
        return transactional_id in self._pending

    def _is_changing(self, transactional_id: str) -> bool:
        """Whether a write is pending, or a decided transaction lacks markers: its completion is pending in Kafka."""
        known = self._store.transactions.get(transactional_id)
        return transactional_id in self._pending or (known is not None and known.state in PREPARED)

    def complete(self, transactional_id: str, now: Instant) -> Transaction | None:
        """All markers are written: return the transaction to write; None if that is being written or was done."""
        known = self._store.transactions.get(transactional_id)
        if known is None or known.state not in PREPARED or transactional_id in self._pending:
            return None
        return self._plan(known.completed(now.wall_ms))

    def settled(self, transactional_id: str, now: Instant) -> None:
        """The write that was planned last has ended: the store has the result."""
        del self._pending[transactional_id]
        known = self._store.transactions.get(transactional_id)
        if known is None or known.state is not TransactionState.ONGOING:
            self._deadlines.pop(transactional_id, None)
        elif transactional_id not in self._deadlines:
            self._set_deadline(transactional_id, now.monotonic_ms + known.timeout_ms)
        else:
            self._wakes.plan(transactional_id, max(self._deadlines[transactional_id], now.monotonic_ms + RETRY_MS))

    def _plan(self, transaction: Transaction) -> Transaction:
        assert transaction.transactional_id not in self._pending
        self._pending[transaction.transactional_id] = transaction
        return transaction

    def _server_abort(self, transaction: Transaction, unused_id: int | None, now: Instant) -> Transaction | None:
        """Return the abort of an ongoing transaction that its producer did not ask for; None if that needs an unused id.

        At version 2 this raises the epoch once, as an abort by the producer does (KAFKA-19367): a producer of version 2 whose
        transaction timed out gets the next epoch by EndTxn, and any producer gets it by InitProducerId with its epoch. If the
        epochs are exhausted, it gets an unused id in the same way. Below version 2 the new epoch is given to nobody and the
        producer is fenced.
        """
        version, next_id = self._version(), NO_PRODUCER_ID
        if version < EPOCH_BUMP_VERSION:
            transaction = transaction.fenced()
        elif transaction.is_epoch_exhausted:
            if unused_id is None:
                return None
            next_id = unused_id
        return transaction.prepared(commit=False, client_version=version, next_producer_id=next_id, now_ms=now.wall_ms)

    # -- time

    @property
    def wake_at_ms(self) -> int | None:
        """The monotonic time at which ``timed_out`` may have work, in milliseconds."""
        return self._wakes.next_ms

    def _set_deadline(self, transactional_id: str, at_ms: int) -> None:
        self._deadlines[transactional_id] = at_ms
        self._wakes.plan(transactional_id, at_ms)

    def timed_out(self, now: Instant) -> Iterator[Transaction]:
        """Plan and yield the aborts of the transactions that took longer than their timeout."""
        for transactional_id in list(self._wakes.due(now.monotonic_ms)):
            deadline_ms = self._deadlines.get(transactional_id)
            if deadline_ms is None:
                continue
            known, abort = self._store.transactions[transactional_id], None
            if deadline_ms <= now.monotonic_ms and transactional_id not in self._pending:
                abort = self._server_abort(known, self._spare_id() if known.is_epoch_exhausted else None, now)
            if abort is None:
                self._wakes.plan(transactional_id, max(deadline_ms, now.monotonic_ms + RETRY_MS))
            else:
                yield self._plan(abort)

    def expired(self, now: Instant) -> Iterator[Transaction]:
        """Plan and yield the removal of the ids that were not used for a long time and have no transaction."""
        horizon_ms = now.wall_ms - self._limits.expiration_ms
        for known in list(self._store.transactions.values()):
            is_old = known.state in _IDLE and known.updated_at_ms <= horizon_ms
            if is_old and known.transactional_id not in self._pending:
                yield self._plan(known.expired(now.wall_ms))

    def validate_state(self) -> None:
        """Assert that ongoing transactions, and no others, have a deadline; O(transactions)."""
        ongoing = {
            each.transactional_id for each in self._store.transactions.values() if each.state is TransactionState.ONGOING
        }
        assert ongoing - self._pending.keys() <= self._deadlines.keys()
        assert self._deadlines.keys() - self._pending.keys() <= ongoing


def _may_be_producer_of(known: Transaction, expected: ProducerEpoch) -> bool:
    """Whether a producer that raises its epoch may be the present one, or the one before its id was replaced."""
    if expected.producer_id == known.producer_id:
        return True
    return expected.producer_id == known.previous_producer_id and expected.epoch >= EPOCH_MAX - 1


def _check_end(known: Transaction, producer: ProducerEpoch) -> ErrorCode:
    if known.producer_id != producer.producer_id:
        return ErrorCode.invalid_producer_id_mapping
    return ErrorCode.none if known.producer_epoch == producer.epoch else ErrorCode.producer_fenced


def _check_end_bumping(known: Transaction, producer: ProducerEpoch) -> ErrorCode:
    """Check the epoch of a client whose every transaction has its own: a retry names the epoch before the present one."""
    has_overflowed = _has_overflowed(known, producer)
    if known.producer_id != producer.producer_id and not has_overflowed:
        return ErrorCode.invalid_producer_id_mapping
    is_current = known.producer_epoch == producer.epoch
    if known.state in (TransactionState.ONGOING, TransactionState.EMPTY):
        is_valid = is_current
    else:
        is_valid = is_current or has_overflowed or _is_bumped_once(known, producer)
    return ErrorCode.none if is_valid else ErrorCode.producer_fenced


def _is_bumped_once(known: Transaction, producer: ProducerEpoch) -> bool:
    """Whether the last transaction had the producer's epoch. One that was fenced by raising the epoch is not known by it."""
    is_last = known.last_producer_epoch == producer.epoch
    return known.bumps_epochs and is_last and known.producer_epoch == producer.epoch + 1


def _has_overflowed(known: Transaction, producer: ProducerEpoch) -> bool:
    """Whether the producer got another id because its epochs were exhausted, and does not know it yet."""
    is_previous = known.previous_producer_id == producer.producer_id
    return is_previous and producer.epoch == EPOCH_MAX - 1 and known.producer_epoch == 0


def _ended_already(known: Transaction, *, commit: bool, bumps: bool, is_retry: bool) -> ErrorCode:
    """Return the answer to EndTxn if no transaction is ongoing or being completed."""
    if known.state is _COMPLETED[commit] and (is_retry or not bumps):
        return ErrorCode.none
    return ErrorCode.invalid_txn_state
