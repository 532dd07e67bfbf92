"""Produce (key 0), versions 3–13; 0–2 are advertised for old librdkafka (KAFKA-18659) and refused.

This is the hot path. The request is parsed in its receive buffer; each batch is checked by its header, gets its offset in
place and is passed to the partition's ledger as a view; the callback that confirms the last batch sends the response. There
is no task, no future and no copy per batch.

acks=0 gets no response (an error closes the connection, as in Kafka), acks=1 when one bookie has the batch on disk, acks=all
when the ack quorum has. With too few bookies the result is NOT_ENOUGH_REPLICAS if the batch was refused, and
NOT_ENOUGH_REPLICAS_AFTER_APPEND if it was sent or queued for the next ledger but did not reach its ack quorum in time; any
other batch that is late gets REQUEST_TIMED_OUT. After the last two the batch may still be committed, and an idempotent
producer's retry is recognised. A retry of a batch that is still in flight gets that batch's outcome.

A transaction's first batch in a partition waits until the transaction's coordinator has confirmed that the partition belongs to
it (``coordination/transaction_verification.py``); the others do not. A transactional batch needs the request's transactional
id, and its producer's other batches are refused while its transaction is open.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.transaction_verification import TransactionVerifier
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.partitions.pending_batch import ACKS_NONE
from stratalog_broker.protocol.errors import produce_error_code_of
from stratalog_broker.protocol.frame import response_head
from stratalog_broker.protocol.produce import (
    TOPIC_ID_VERSION,
    PartitionResult,
    encode_response,
    parse_request,
)
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.batch_append import BatchAppend
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.deadlines import Deadlines
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.pending_produce import TIMED_OUT, PendingProduce, ProduceServices
from stratalog_broker.requests.permissions import FindPartition, Permissions, except_denied
from stratalog_broker.requests.produce_checks import Refused
from stratalog_broker.requests.produced_records import ProducedRecords
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.records import TopicPartition

_ACCESS: Final = Access(Operation.WRITE, Resource.TOPIC)
_KEY: Final = 0
_LOST: Final = int(ErrorCode.not_leader_or_follower)
_INTERNAL: Final = int(ErrorCode.invalid_topic_exception)
_DENIED: Final = int(ErrorCode.topic_authorization_failed)
_POLICY: Final = int(ErrorCode.policy_violation)
_READ_ONLY: Final = "this is a read-only archive: produce to the cluster"


class ProduceHandler:
    """Handles all Produce requests of the broker."""

    def __init__(
        self,
        *,
        partitions: Partitions,
        permissions: Permissions,
        verifier: TransactionVerifier,
        deadlines: Deadlines,
        clock: Clock,
        settings: BrokerSettings,
        records: ProducedRecords,
    ) -> None:
        self._partitions = partitions
        self._permissions = permissions
        self._clock = clock
        self._services = ProduceServices(
            partitions=partitions, permissions=permissions, verifier=verifier, deadlines=deadlines, clock=clock, records=records
        )
        self._append_timeout_ms = settings.append_timeout_ms

    def __call__(self, context: RequestContext, body: memoryview) -> None:
        """Append all batches; the response is sent once ``acks`` is satisfied for each of them."""
        request = parse_request(body, context.api_version)
        produce = PendingProduce(self._services, context, request)
        partitions = self._partitions
        by_id = context.api_version >= TOPIC_ID_VERSION
        find: FindPartition = partitions.find_by_id if by_id else partitions.find_by_name
        denied: frozenset[bytes] = frozenset()
        if not self._permissions.is_open:
            topic_by_id = partitions.topic_by_id if by_id else None
            keys = (key for key, _ in request.topics)
            denied = self._permissions.denied_keys(context, _ACCESS, keys, topic_by_id)
            find = except_denied(find, denied)
        now_ms = self._clock.wall_ms()
        for (key, batches), (_, results) in zip(request.topics, produce.results, strict=True):
            for position, (index, batch) in enumerate(batches):
                log = find(key, index)
                if log is None or log.topic.internal:
                    if key in denied:
                        results[position] = PartitionResult(index, _DENIED)
                    else:
                        results[position] = self._not_here(context, key, index, by_id=by_id)
                    continue
                try:
                    BatchAppend(context, produce, results, position, log).start(batch, request.acks, now_ms)
                except Refused as refused:
                    results[position] = PartitionResult(index, int(refused.code), error_message=str(refused))
                except StratalogError as failure:
                    results[position] = PartitionResult(
                        index, int(produce_error_code_of(failure)), error_message=failure.message
                    )
        if request.acks == ACKS_NONE:
            _finish_unanswered(context, produce)
        else:
            produce.walked(min(max(request.timeout_ms, 0), self._append_timeout_ms))

    def _not_here(self, context: RequestContext, key: bytes, index: int, *, by_id: bool) -> PartitionResult:
        """Return the error and the owner of a partition that cannot be written here. Clients cannot write internal topics."""
        partitions = self._partitions
        topic = partitions.topic_by_id(key) if by_id else partitions.topic_by_name(key)
        if topic is None:
            code = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
            return PartitionResult(index, int(code))
        if topic.internal:
            return PartitionResult(
                index, _INTERNAL, error_message=f"topic {topic.name} is internal: clients cannot append to it"
            )
        if not 0 <= index < topic.partition_count:
            return PartitionResult(index, int(ErrorCode.unknown_topic_or_partition))
        leader = partitions.leader_of(TopicPartition(topic.topic_id, index), context.listener)
        return PartitionResult(index, _LOST, leader=leader)


def _finish_unanswered(context: RequestContext, produce: PendingProduce) -> None:
    codes = {result.error_code for _, results in produce.results for result in results} - {TIMED_OUT, 0}
    if codes:
        context.close_connection(f"a batch with acks=0 was refused: {ErrorCode(codes.pop()).name}")
    context.respond(())


def refuse_all(context: RequestContext, body: memoryview) -> None:
    """Refuse every batch with POLICY_VIOLATION, which no producer retries; for servers of archives.

    They serve Produce because librdkafka derives from its versions how it fetches.
    """
    request = parse_request(body, context.api_version)
    if request.acks == ACKS_NONE:
        context.close_connection(_READ_ONLY)
        context.respond(())
        return
    results = [
        (key, [PartitionResult(index, _POLICY, error_message=_READ_ONLY) for index, _ in batches])
        for key, batches in request.topics
    ]
    encoded = encode_response(results, context.api_version)
    context.respond((response_head(_KEY, context.api_version, context.correlation_id, len(encoded)), encoded))


API: Final = HandlerInfo(
    key=_KEY,
    min_version=3,
    max_version=13,
    handle_raw=ProduceHandler,
    advertised_min_version=0,
    access=_ACCESS,
)
READ_ONLY_API: Final = replace(API, handle_raw=refuse_all)
