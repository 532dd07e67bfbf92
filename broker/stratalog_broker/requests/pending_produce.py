"""One Produce request from its arrival to its response: collects the results of its partitions, and its time-out."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.transaction_verification import Transaction, TransactionVerifier, Verified
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.frame import response_head
from stratalog_broker.protocol.produce import TOPIC_ID_VERSION, Leader, PartitionResult, ProduceRequest, encode_response
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.deadlines import Deadlines
from stratalog_broker.requests.permissions import Permissions
from stratalog_broker.requests.produce_checks import Refused
from stratalog_broker.requests.produced_records import ProducedRecords
from stratalog_core.batches.batch import BatchHeader
from stratalog_core.ports import Clock
from stratalog_metadata.records import TopicPartition

ADDING_VERSION: Final = 12
"""From this version on, a batch adds its partition to its transaction (transaction version 2)."""
TIMED_OUT: Final = int(ErrorCode.request_timed_out)
_AFTER_APPEND: Final = int(ErrorCode.not_enough_replicas_after_append)
_PRODUCE_KEY: Final = 0
_TRANSACTIONAL: Final = Access(Operation.WRITE, Resource.TRANSACTIONAL_ID)


@functools.lru_cache(maxsize=1024)
def _no_result_yet(index: int) -> PartitionResult:
    """Return what is reported of a partition that is not finished in time. Shared by requests: it never changes."""
    return PartitionResult(index, TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceServices:
    """The parts of the broker that Produce requests use."""

    partitions: Partitions
    permissions: Permissions
    verifier: TransactionVerifier
    deadlines: Deadlines
    clock: Clock
    records: ProducedRecords


class PendingProduce:
    """One unanswered Produce request. ``results`` has one entry per topic, filled in as partitions finish."""

    __slots__ = (
        "_context",
        "_deadline",
        "_producer",
        "_services",
        "_transactional_id",
        "_waiting",
        "acks",
        "is_answered",
        "results",
    )

    def __init__(self, services: ProduceServices, context: RequestContext, request: ProduceRequest) -> None:
        self._services = services
        self._context = context
        self._transactional_id = request.transactional_id
        self._producer: tuple[int, int] | None = None
        self.acks = request.acks
        self._waiting = 1
        self._deadline: object | None = None
        self.is_answered = False
        self.results: list[tuple[bytes, list[PartitionResult]]] = [
            (key, [_no_result_yet(index) for index, _ in batches]) for key, batches in request.topics
        ]

    def wait(self) -> None:
        """Expect one more call of ``done``."""
        self._waiting += 1

    def done(self) -> None:
        """Count one partition, or the loop over all of them, as finished; the last call sends the response."""
        self._waiting -= 1
        if self._waiting == 0:
            self.answer()

    def walked(self, timeout_ms: int) -> None:
        """Start the time-out for batches in flight; called once all batches have been sent."""
        if self._waiting > 1:
            self._deadline = self._services.deadlines.add(timeout_ms / 1000, self._expire)
        self.done()

    def verify(self, log: PartitionLog, header: BatchHeader) -> asyncio.Future[Verified]:
        """Ask the transaction's coordinator about the partition, before the transaction's first batch there."""
        assert self._transactional_id is not None, "the batch was checked with the request's transactional id"
        adds = self._context.api_version >= ADDING_VERSION
        transaction = Transaction(self._transactional_id, header.producer_id, header.producer_epoch, adds)
        return self._services.verifier.ask(transaction, log, header)

    def check_transaction(self, header: BatchHeader) -> None:
        """Raise ``Refused`` unless the request may write this transactional batch."""
        name = self._transactional_id
        if name is None or not self._services.permissions.allows(self._context, _TRANSACTIONAL, name):
            raise Refused(
                ErrorCode.transactional_id_authorization_failed, f"transactional id {name} may not be used for this request"
            )
        producer = header.producer_id, header.producer_epoch
        if self._producer is None:
            self._producer = producer
        elif self._producer != producer:
            raise Refused(
                ErrorCode.invalid_producer_id_mapping, "the transactional batches of a request have more than one producer"
            )

    @property
    def records(self) -> ProducedRecords:
        """Examines the records of batches."""
        return self._services.records

    def now_ms(self) -> int:
        """Return the broker's wall time."""
        return self._services.clock.wall_ms()

    def leader_of(self, topic_partition: TopicPartition) -> Leader | None:
        """Return the partition's owner, with its address for the client's listener."""
        return self._services.partitions.leader_of(topic_partition, self._context.listener)

    def _expire(self) -> None:
        """Respond at the time-out; unfinished partitions that lack bookies get NOT_ENOUGH_REPLICAS_AFTER_APPEND."""
        partitions = self._services.partitions
        find = partitions.find_by_id if self._context.api_version >= TOPIC_ID_VERSION else partitions.find_by_name
        for key, results in self.results:
            for position, result in enumerate(results):
                log = find(key, result.partition) if result.error_code == TIMED_OUT else None
                if log is not None and log.lacks_quorum:
                    results[position] = PartitionResult(result.partition, _AFTER_APPEND)
        self.answer()

    def answer(self) -> None:
        """Send the response, once; later results are discarded."""
        if self.is_answered:
            return
        self.is_answered = True
        context = self._context
        if self._deadline is not None:
            self._services.deadlines.discard(self._deadline)
        body = encode_response(self.results, context.api_version, context.throttle_ms)
        context.respond((response_head(_PRODUCE_KEY, context.api_version, context.correlation_id, len(body)), body))
