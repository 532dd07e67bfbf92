"""Produce (key 0), versions 3–13; 0–2 are advertised for old librdkafka (KAFKA-18659) and refused.

This is the hot path. The request is parsed in its receive buffer; each batch is checked by its header, gets its offset in
place and is passed to the partition's ledger as a view; the callback that confirms the last batch sends the response. There
is no task, no future and no copy per batch.

acks=0 gets no response (an error closes the connection, as in Kafka), acks=1 when one bookie has the batch on disk, acks=all
when the ack quorum has. With too few bookies the result is NOT_ENOUGH_REPLICAS if the batch was refused, and
NOT_ENOUGH_REPLICAS_AFTER_APPEND if it was sent or queued for the next ledger but did not reach its ack quorum in time; any
other batch that is late gets REQUEST_TIMED_OUT. After the last two the batch may still be committed, and an idempotent
producer's retry is recognised. A retry of a batch that is still in flight gets that batch's outcome.
Transactions are not served yet: transactional batches are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.partitions.pending_batch import Acks, OnDone, Outcome
from stratalog_broker.protocol.errors import produce_error_code_of
from stratalog_broker.protocol.frame import response_head
from stratalog_broker.protocol.produce import (
    TOPIC_ID_VERSION,
    Leader,
    PartitionResult,
    ProduceRequest,
    encode_response,
    parse_request,
)
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.deadlines import Deadlines
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import FindPartition, Permissions, except_denied
from stratalog_broker.requests.produce_checks import Refused, check_produced
from stratalog_core.batches.batch import BatchHeader, assign_log_append_time
from stratalog_core.errors import NotLeader, StratalogError
from stratalog_core.partition_state.producer_states import Verdict
from stratalog_core.ports import Clock
from stratalog_metadata.records import TopicPartition

_ACCESS: Final = Access(Operation.WRITE, Resource.TOPIC)
_KEY: Final = 0
_TIMED_OUT: Final = int(ErrorCode.request_timed_out)
_AFTER_APPEND: Final = int(ErrorCode.not_enough_replicas_after_append)
_LOST: Final = int(ErrorCode.not_leader_or_follower)
_INTERNAL: Final = int(ErrorCode.invalid_topic_exception)
_DENIED: Final = int(ErrorCode.topic_authorization_failed)
_POLICY: Final = int(ErrorCode.policy_violation)
_READ_ONLY: Final = "this is a read-only archive: produce to the cluster"
_VALID_ACKS: Final = frozenset({-1, 0, 1})


class PendingProduce:
    """One unanswered Produce request. ``results`` has one entry per topic, filled in as partitions finish."""

    __slots__ = ("_context", "_deadline", "_handler", "_waiting", "is_answered", "results")

    def __init__(self, handler: ProduceHandler, context: RequestContext, request: ProduceRequest) -> None:
        self._handler = handler
        self._context = context
        self._waiting = 1
        self._deadline: object | None = None
        self.is_answered = False
        self.results: list[tuple[bytes, list[PartitionResult]]] = [
            (topic.key, [PartitionResult(index, _TIMED_OUT) for index, _ in topic.partitions]) for topic in request.topics
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
            self._deadline = self._handler.deadlines.add(timeout_ms / 1000, self._expire)
        self.done()

    def leader_of(self, topic_partition: TopicPartition) -> Leader | None:
        """Return the partition's owner, with its address for the client's listener."""
        return self._handler.partitions.leader_of(topic_partition, self._context.listener)

    def _expire(self) -> None:
        """Respond at the time-out; unfinished partitions that lack bookies get NOT_ENOUGH_REPLICAS_AFTER_APPEND."""
        partitions = self._handler.partitions
        find = partitions.find_by_id if self._context.api_version >= TOPIC_ID_VERSION else partitions.find_by_name
        for key, results in self.results:
            for position, result in enumerate(results):
                log = find(key, result.partition) if result.error_code == _TIMED_OUT else None
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
            self._handler.deadlines.discard(self._deadline)
        body = encode_response(self.results, context.api_version, context.throttle_ms)
        context.respond((response_head(_KEY, context.api_version, context.correlation_id, len(body)), body))


class _Append:
    """The append of one partition's batch, from its checks to its result in the response."""

    __slots__ = ("_append_time_ms", "_context", "_index", "_log", "_position", "_produce", "_results")

    def __init__(
        self, context: RequestContext, produce: PendingProduce, results: list[PartitionResult], position: int, log: PartitionLog
    ) -> None:
        self._context = context
        self._produce = produce
        self._results = results
        self._position = position
        self._index = results[position].partition
        self._log = log
        self._append_time_ms = -1

    def start(self, batch: memoryview | None, acks: int, now_ms: int) -> None:
        """Check the batch and append it. Raises ``Refused`` or a ``StratalogError``, in which case nothing was appended."""
        if acks not in _VALID_ACKS:
            raise Refused(ErrorCode.invalid_required_acks, f"acks is {acks}; choose -1 (all), 0 or 1")
        if batch is None:
            raise Refused(ErrorCode.invalid_record, "no record batch was sent for the partition")
        log = self._log
        header = check_produced(batch, log.configs, now_ms)
        if header.producer_id >= 0 and self._is_retry(header, acks):
            return
        if log.configs.is_log_append_time:
            self._append_time_ms = now_ms
            assign_log_append_time(batch, now_ms)
            header = header._replace(max_timestamp_ms=now_ms)
        if acks == Acks.NONE:
            log.append(batch, header, acks, None, self._context.release)
        else:
            log.append(batch, header, acks, self._settle, self._context.release)
            self._produce.wait()
        self._context.hold()

    def _is_retry(self, header: BatchHeader, acks: int) -> bool:
        """Return whether the batch is already in the log, in which case its result is the first attempt's.

        Raises ``Refused``, or ``NotLeader`` if its predecessor may still be resent after a takeover.
        """
        verdict, earlier = self._log.core.producers.judge(header)
        if verdict is Verdict.APPEND:
            return False
        begins_late = verdict is Verdict.UNKNOWN and header.base_sequence != 0
        if (verdict is Verdict.OUT_OF_ORDER or begins_late) and self._log.admission.is_settling:
            # It overtook a batch that was refused or lost before the takeover; the client retries both in order.
            raise NotLeader(f"sequence {header.base_sequence} of producer {header.producer_id} arrived before its predecessor")
        if verdict is Verdict.UNKNOWN:
            return False
        producer = f"producer {header.producer_id} epoch {header.producer_epoch}"
        if verdict is Verdict.FENCED:
            raise Refused(ErrorCode.invalid_producer_epoch, f"{producer} is fenced by a newer epoch")
        if verdict is Verdict.OUT_OF_ORDER:
            raise Refused(
                ErrorCode.out_of_order_sequence_number, f"{producer} sent sequence {header.base_sequence} out of order"
            )
        assert earlier is not None
        if self._log.core.await_unconfirmed(earlier.last_offset + 1, self._settle_retry(earlier.base_offset)):
            self._produce.wait()
        else:
            self._results[self._position] = self._result(earlier.base_offset)
        return True

    def _settle_retry(self, base_offset: int) -> OnDone:
        return lambda outcome: self._settle(base_offset if isinstance(outcome, int) else outcome)

    def _settle(self, outcome: Outcome) -> None:
        if isinstance(outcome, int):
            self._results[self._position] = self._result(outcome)
        else:
            code = int(produce_error_code_of(outcome))
            leader = self._produce.leader_of(self._log.topic_partition) if code == _LOST else None
            self._results[self._position] = PartitionResult(self._index, code, leader=leader)
        self._produce.done()

    def _result(self, base_offset: int) -> PartitionResult:
        return PartitionResult(self._index, 0, base_offset, self._append_time_ms, self._log.core.log_start_offset)


class ProduceHandler:
    """Handles all Produce requests of the broker."""

    def __init__(
        self, *, partitions: Partitions, permissions: Permissions, deadlines: Deadlines, clock: Clock, settings: BrokerSettings
    ) -> None:
        self.partitions = partitions
        self._permissions = permissions
        self.deadlines = deadlines
        self._clock = clock
        self._append_timeout_ms = settings.append_timeout_ms

    def __call__(self, context: RequestContext, body: memoryview) -> None:
        """Append all batches; the response is sent once ``acks`` is satisfied for each of them."""
        request = parse_request(body, context.api_version)
        produce = PendingProduce(self, context, request)
        partitions = self.partitions
        by_id = context.api_version >= TOPIC_ID_VERSION
        find: FindPartition = partitions.find_by_id if by_id else partitions.find_by_name
        denied: frozenset[bytes] = frozenset()
        if not self._permissions.is_open:
            topic_by_id = partitions.topic_by_id if by_id else None
            keys = (topic.key for topic in request.topics)
            denied = self._permissions.denied_keys(context, _ACCESS, keys, topic_by_id)
            find = except_denied(find, denied)
        now_ms = self._clock.wall_ms()
        for (_, results), topic in zip(produce.results, request.topics, strict=True):
            for position, (index, batch) in enumerate(topic.partitions):
                log = find(topic.key, index)
                if log is None or log.topic.internal:
                    if topic.key in denied:
                        results[position] = PartitionResult(index, _DENIED)
                    else:
                        results[position] = self._not_here(context, topic.key, index, by_id=by_id)
                    continue
                try:
                    _Append(context, produce, results, position, log).start(batch, request.acks, now_ms)
                except Refused as refused:
                    results[position] = PartitionResult(index, int(refused.code), error_message=str(refused))
                except StratalogError as failure:
                    results[position] = PartitionResult(
                        index, int(produce_error_code_of(failure)), error_message=failure.message
                    )
        if request.acks == Acks.NONE:
            _finish_unanswered(context, produce)
        else:
            produce.walked(min(max(request.timeout_ms, 0), self._append_timeout_ms))

    def _not_here(self, context: RequestContext, key: bytes, index: int, *, by_id: bool) -> PartitionResult:
        """Return the error and the owner of a partition that cannot be written here. Clients cannot write internal topics."""
        partitions = self.partitions
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
    codes = {result.error_code for _, results in produce.results for result in results} - {_TIMED_OUT, 0}
    if codes:
        context.close_connection(f"a batch with acks=0 was refused: {ErrorCode(codes.pop()).name}")
    context.respond(())


def refuse_all(context: RequestContext, body: memoryview) -> None:
    """Refuse every batch with POLICY_VIOLATION, which no producer retries; for servers of archives.

    They serve Produce because librdkafka derives from its versions how it fetches.
    """
    request = parse_request(body, context.api_version)
    if request.acks == Acks.NONE:
        context.close_connection(_READ_ONLY)
        context.respond(())
        return
    results = [
        (topic.key, [PartitionResult(index, _POLICY, error_message=_READ_ONLY) for index, _ in topic.partitions])
        for topic in request.topics
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
