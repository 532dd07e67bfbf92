"""The shell of one partition's transactions: writes what the core plans, and continues what is decided.

The decision of a transaction is the record of its state PrepareCommit or PrepareAbort. Once that is durable the client is
answered, and this coordinator, or whichever replays the record, sends the markers and then writes the completed state.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.coordinator_partition import CoordinatorKind
from stratalog_broker.coordination.record_writer import RecordWriter
from stratalog_broker.coordination.transactions.core.coordinator import (
    Planned,
    ProducerEpoch,
    TransactionCoordinator,
    TransactionLimits,
)
from stratalog_broker.coordination.transactions.core.marker_queue import Decision, decision_of
from stratalog_broker.coordination.transactions.core.records import record_of
from stratalog_broker.coordination.transactions.core.store import TransactionStore
from stratalog_broker.coordination.transactions.core.transaction import (
    NO_PRODUCER_ID,
    PREPARED,
    PartitionName,
    TopicIds,
    Transaction,
)
from stratalog_broker.coordination.transactions.marker_sender import MarkerSender
from stratalog_broker.coordination.wake_timer import WakeTimer
from stratalog_broker.coordination.wake_times import Instant
from stratalog_broker.partitions.internal_topics import TRANSACTION_STATE
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.ports import Clock

KEY_TYPE: Final = 1
"""The key type of transactions in FindCoordinator."""
RETRY_S: Final = 0.1
_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class EndedTransaction(NamedTuple):
    """The answer to EndTxn: the producer id and epoch of the client's next transaction."""

    error: ErrorCode
    producer: ProducerEpoch = ProducerEpoch(-1, -1)


class TransactionApplication:
    """Serves the transactional ids of one partition from their loaded state."""

    def __init__(
        self,
        limits: TransactionLimits,
        clock: Clock,
        store: TransactionStore,
        writer: RecordWriter,
        coordinator_epoch: int,
        markers: MarkerSender,
        version: Callable[[], int],
        spare_id: Callable[[], int | None],
    ) -> None:
        self.number = next(_numbers)
        self._clock = clock
        self._store = store
        self._writer = writer
        self._coordinator_epoch = coordinator_epoch
        self._markers = markers
        self._coordinator: TransactionCoordinator | None
        self._coordinator = TransactionCoordinator(limits, store, self._now(), version, spare_id)
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = WakeTimer(self._tick)
        for transaction in store.transactions.values():
            if transaction.state in PREPARED:
                self._continue(transaction)
        self._plan_wake()

    def resigned(self) -> None:
        self._coordinator = None
        self._markers.forget(self.number)
        self._wake.cancel()
        for task in self._tasks:
            task.cancel()

    # -- requests

    @property
    def coordinator(self) -> TransactionCoordinator:
        """The core. Raises ``KafkaError`` NOT_COORDINATOR after this broker has lost the partition."""
        if self._coordinator is None:
            raise KafkaError(ErrorCode.not_coordinator)
        return self._coordinator

    def find(self, transactional_id: str) -> Transaction | None:
        return self._store.transactions.get(transactional_id)

    def all(self) -> Iterable[Transaction]:
        return self._store.transactions.values()

    async def init_producer_id(
        self, transactional_id: str, timeout_ms: int, expected: ProducerEpoch | None, unused_id: int | None
    ) -> ProducerEpoch | ErrorCode:
        """InitProducerId: return the producer id and epoch, or a code; CONCURRENT_TRANSACTIONS while a transaction ends."""
        planned = self.coordinator.init_producer_id(transactional_id, timeout_ms, expected, unused_id, self._now())
        error = await self._write(planned)
        if error is not ErrorCode.none:
            return error
        assert isinstance(planned, Transaction), "without a write the answer is an error"
        if planned.state in PREPARED:
            return ErrorCode.concurrent_transactions
        return ProducerEpoch(planned.producer_id, planned.producer_epoch)

    async def add_partitions(
        self,
        transactional_id: str,
        producer: ProducerEpoch,
        added: frozenset[PartitionName],
        topic_ids: TopicIds,
        client_version: int,
    ) -> ErrorCode:
        """AddPartitionsToTxn: return NONE once the transaction durably has the partitions."""
        return await self._write(
            self.coordinator.add_partitions(transactional_id, producer, added, topic_ids, client_version, self._now())
        )

    async def end(
        self, transactional_id: str, producer: ProducerEpoch, *, commit: bool, client_version: int, unused_id: int | None
    ) -> EndedTransaction:
        """EndTxn: return NONE once the decision is durable; the markers follow."""
        planned = self.coordinator.end(
            transactional_id, producer, commit=commit, client_version=client_version, unused_id=unused_id, now=self._now()
        )
        error = await self._write(planned)
        if error is not ErrorCode.none:
            return EndedTransaction(error)
        ended = planned if isinstance(planned, Transaction) else self._store.transactions[transactional_id]
        if ended.next_producer_id != NO_PRODUCER_ID:
            return EndedTransaction(error, ProducerEpoch(ended.next_producer_id, 0))
        return EndedTransaction(error, ProducerEpoch(ended.producer_id, ended.producer_epoch))

    # -- writes

    async def _write(self, planned: Planned) -> ErrorCode:
        """Write a planned transaction and continue from it; a code that was decided without a write is returned as it is."""
        if not isinstance(planned, Transaction):
            return planned
        done: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()
        self._begin(planned, lambda error: None if done.done() else done.set_result(error))
        return await done

    def _begin(self, planned: Transaction, then: Callable[[ErrorCode], None]) -> None:
        """Write a planned transaction. Its outcome is settled even if the client that asked for it is gone."""

        def written(error: ErrorCode) -> None:
            if self._coordinator is not None:
                self._coordinator.settled(planned.transactional_id, self._now())
                if error is ErrorCode.none and planned.state in PREPARED:
                    self._continue(planned)
                self._plan_wake()
            then(error if self._coordinator is not None else ErrorCode.not_coordinator)

        self._writer.write([record_of(planned)], written)

    def _continue(self, prepared: Transaction) -> None:
        """Carry out a durable decision."""
        if prepared.partitions:
            self._markers.add(decision_of(prepared, self.number, self._coordinator_epoch), prepared.marked_partitions())
        else:
            self.complete(prepared.transactional_id)

    def complete(self, transactional_id: str) -> None:
        """Write that a transaction has all of its markers; repeat it until that is durable."""
        task = asyncio.get_running_loop().create_task(self._complete(transactional_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _complete(self, transactional_id: str) -> None:
        while self._coordinator is not None:
            planned = self._coordinator.complete(transactional_id, self._now())
            if planned is None or await self._write(planned) is ErrorCode.none:
                return
            await asyncio.sleep(RETRY_S)

    # -- time

    def expire(self) -> None:
        """Remove the transactional ids that were not used for a long time."""
        if self._coordinator is not None:
            for planned in self._coordinator.expired(self._now()):
                self._begin(planned, lambda _: None)

    def _now(self) -> Instant:
        return Instant(monotonic_ms=int(self._clock.monotonic() * 1000), wall_ms=self._clock.wall_ms())

    def _plan_wake(self) -> None:
        if self._coordinator is not None:
            self._wake.plan(self._coordinator.wake_at_ms, self._now().monotonic_ms)

    def _tick(self) -> None:
        if self._coordinator is not None:
            for planned in self._coordinator.timed_out(self._now()):
                _log.info("aborting the transaction of %s: it exceeds its timeout", planned.transactional_id)
                self._begin(planned, lambda _: None)
            self._plan_wake()


def transaction_kind(
    limits: TransactionLimits,
    clock: Clock,
    markers: MarkerSender,
    version: Callable[[], int],
    spare_id: Callable[[], int | None],
    *,
    partition_count: int,
    copies: int,
) -> CoordinatorKind[TransactionStore, TransactionApplication]:
    """Return transactions as a kind of coordinator; the numbers are those of ``__transaction_state`` when it is created.

    ``version`` returns the cluster's ``transaction.version``, ``spare_id`` an unused producer id, or None for the moment.
    """

    def start(store: TransactionStore, writer: RecordWriter, leader_epoch: int) -> TransactionApplication:
        return TransactionApplication(limits, clock, store, writer, leader_epoch, markers, version, spare_id)

    return CoordinatorKind(
        key_type=KEY_TYPE,
        topic=TRANSACTION_STATE,
        partition_count=partition_count,
        copies=copies,
        load=TransactionStore.from_snapshot,
        start=start,
    )


def completed(applications: Iterable[TransactionApplication], decision: Decision) -> None:
    """Tell the coordinator of a decision, if it still is one, that all markers are written."""
    for application in applications:
        if application.number == decision.coordinator:
            application.complete(decision.transactional_id)
