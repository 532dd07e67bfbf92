"""The append of one produced batch: its checks, the verification of its transaction, its result in the response.

Each batch is checked by its header; for some topics its records are examined, too (``produced_records.py``). A retry is not
appended again, but gets the outcome of its first attempt. The first batch of a transaction waits for the transaction's
coordinator; batches that wait for one answer are appended in their order.

As in Kafka, a batch does not keep the attribute that its timestamps are the broker's. Differences from Apache Kafka: it is not
refused for it in a topic where they are. Nor does a batch keep a delete horizon (KIP-534): compaction would believe it, and
delete tombstones before ``delete.retention.ms`` is over, as Kafka's does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.transaction_verification import Verified
from stratalog_broker.partitions.appended_transactions import VerificationGuard
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.pending_batch import ACKS_NONE, OnDone, Outcome
from stratalog_broker.protocol.errors import produce_error_code_of
from stratalog_broker.protocol.produce import PartitionResult
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.pending_produce import ADDING_VERSION, PendingProduce
from stratalog_broker.requests.produce_checks import Refused, check_produced
from stratalog_broker.requests.produced_records import Examined, Produced
from stratalog_core.batches.batch import (
    BROKER_BITS,
    TRANSACTIONAL_BIT,
    BatchHeader,
    assign_log_append_time,
    clear_broker_bits,
)
from stratalog_core.batches.checkpoint import SequencedBatch
from stratalog_core.errors import NotLeader, StratalogError
from stratalog_core.partition_state.producer_states import APPEND, Verdict

_LOST: Final = int(ErrorCode.not_leader_or_follower)
_VALID_ACKS: Final = frozenset({-1, 0, 1})
_ABORTABLE_VERSION: Final = 11
"""From this version on, clients know TRANSACTION_ABORTABLE."""
_COORDINATOR_CODES: Final[Mapping[ErrorCode, ErrorCode]] = {
    ErrorCode.producer_fenced: ErrorCode.invalid_producer_epoch,
    ErrorCode.cluster_authorization_failed: ErrorCode.invalid_txn_state,
    ErrorCode.network_exception: ErrorCode.not_enough_replicas,
    ErrorCode.coordinator_load_in_progress: ErrorCode.not_enough_replicas,
    ErrorCode.coordinator_not_available: ErrorCode.not_enough_replicas,
    ErrorCode.not_coordinator: ErrorCode.not_enough_replicas,
}
"""Coordinators' codes that producers do not expect in a Produce response, and Kafka's replacements."""


class BatchAppend:
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
        if header.attributes & BROKER_BITS:
            header = clear_broker_bits(batch)
        if log.configs.examines_records:
            produced = Produced(batch, header, log.configs, now_ms, self._context.charge)
            if not self._produce.records.check_at_once(log.topic_partition, produced):
                self._produce.wait()
                self._context.hold()
                self._produce.records.start(log.topic_partition, produced, self._records_examined)
                return
        self._admit(batch, header, now_ms)

    def _records_examined(self, outcome: Examined | Refused | StratalogError) -> None:
        """Append the batch as it is to be stored, or refuse it, now that its records are known."""
        try:
            if not isinstance(outcome, Examined):
                raise outcome
            if not self._log.is_serving:
                raise NotLeader(f"{self._log.topic_partition} was lost while a batch was examined")
            if not self._produce.is_answered:
                self._admit(outcome.batch, outcome.header, self._produce.now_ms())
        except (Refused, StratalogError) as refused:
            self._refuse(refused)
        except Exception:
            self._context.fail()
            return
        self._produce.done()
        self._context.release()

    def _refuse(self, failure: Refused | StratalogError) -> None:
        """Make ``failure``, which came after ``start`` had returned, the batch's result."""
        if isinstance(failure, Refused):
            result = PartitionResult(self._index, int(failure.code), error_message=str(failure))
        else:
            result = PartitionResult(self._index, int(produce_error_code_of(failure)), error_message=failure.message)
        self._results[self._position] = result
        if self._produce.acks == ACKS_NONE:
            self._context.close_connection(f"a batch with acks=0 was refused: {ErrorCode(result.error_code).name}")

    def _admit(self, batch: memoryview, header: BatchHeader, now_ms: int) -> None:
        """Append a sound batch, now or after the verification of its transaction."""
        log = self._log
        if header.producer_id >= 0:
            if header.attributes & TRANSACTIONAL_BIT:
                self._produce.check_transaction(header)
                if not log.core.has_open_transaction(header):
                    self._begin_transaction(batch, header)
                    return
            elif header.producer_id in log.core.appended_transactions.first_offsets:
                raise Refused(
                    ErrorCode.invalid_txn_state, f"producer {header.producer_id} has an open transaction: send it within that"
                )
            if self._is_retry(header):
                return
        if self._produce.acks == ACKS_NONE:
            self._append(batch, header, now_ms)
            return
        self._produce.wait()
        try:
            self._append(batch, header, now_ms)
        except BaseException:
            self._produce.done()  # Others are still expected, at least the end of the loop over all partitions.
            raise

    def _append(self, batch: memoryview, header: BatchHeader, now_ms: int) -> None:
        """Give the batch to the log. If the log finds itself inconsistent, it reports the batch as lost within this call."""
        log, acks = self._log, self._produce.acks
        if log.configs.is_log_append_time:
            self._append_time_ms = now_ms
            assign_log_append_time(batch, now_ms)
            header = header._replace(max_timestamp_ms=now_ms)
        self._context.hold()
        try:
            log.append(batch, header, acks, None if acks == ACKS_NONE else self._settle, self._context.release)
        except BaseException:
            self._context.release()
            raise

    # -- the first batch of a transaction ------------------------------------------------------------------------------

    def _begin_transaction(self, batch: memoryview, header: BatchHeader) -> None:
        """Append the batch when the coordinator has confirmed that the partition belongs to the transaction."""
        core = self._log.core
        verdict, earlier = core.producers.judge(header)
        if verdict is Verdict.DUPLICATE:
            assert earlier is not None
            self._repeat(earlier)
            return
        if verdict is Verdict.FENCED:
            raise _fenced(header)
        self._produce.wait()
        self._context.hold()
        answer = self._produce.verify(self._log, header)
        answer.add_done_callback(partial(self._verified, batch, header))

    def _verified(self, batch: memoryview, header: BatchHeader, answer: asyncio.Future[Verified]) -> None:
        """Append the batch, or refuse it, now that the coordinator has answered or the broker stops."""
        is_in_flight = False
        try:
            if not answer.cancelled() and not self._produce.is_answered:
                is_in_flight = self._append_verified(batch, header, *answer.result())
        except (Refused, StratalogError) as refused:
            self._refuse(refused)
        except Exception:
            self._context.fail()
            return
        if not is_in_flight:
            self._produce.done()
        self._context.release()

    def _append_verified(self, batch: memoryview, header: BatchHeader, code: ErrorCode, guard: VerificationGuard) -> bool:
        """Append the batch unless it is a retry; return whether its append will be reported. Raises what ``start`` raises."""
        log, version = self._log, self._context.api_version
        if code is not ErrorCode.none:
            raise Refused(_code_for(code, version), f"the partition is not known to be in the transaction: {code.name}")
        if not log.is_serving:
            raise NotLeader(f"{log.topic_partition} was lost while its transaction was verified")
        core = log.core
        begins = not core.has_open_transaction(header)
        if begins and core.producers.epoch_of(header.producer_id) > header.producer_epoch:
            raise _fenced(header)
        if begins and not core.appended_transactions.is_standing(header.producer_id, guard):
            stale = ErrorCode.concurrent_transactions if version >= ADDING_VERSION else ErrorCode.invalid_txn_state
            raise Refused(stale, "another transaction of the producer has ended while this one was verified")
        is_late = begins and header.base_sequence > guard.lowest_sequence
        if version >= ADDING_VERSION and header.base_sequence != 0:
            is_late |= core.producers.epoch_of(header.producer_id) < 0
        if is_late:
            raise _overtaken(header) if log.admission.is_settling else _out_of_order(header)
        if self._is_retry(header):
            return False
        self._append(batch, header, self._produce.now_ms())
        return self._produce.acks != ACKS_NONE

    # -- retries -------------------------------------------------------------------------------------------------------

    def _is_retry(self, header: BatchHeader) -> bool:
        """Return whether the batch is already in the log, in which case its result is the first attempt's.

        Raises ``Refused``, or ``NotLeader`` if its predecessor may still be resent after a takeover.
        """
        verdict, earlier = self._log.core.producers.judge(header)
        if verdict is APPEND:
            return False
        begins_late = verdict is Verdict.UNKNOWN and header.base_sequence != 0
        if (verdict is Verdict.OUT_OF_ORDER or begins_late) and self._log.admission.is_settling:
            if begins_late:
                self._log.late_beginnings.refused(header)
            raise _overtaken(header)
        if verdict is Verdict.UNKNOWN:
            if begins_late and not self._log.late_beginnings.may_begin(header):
                raise _overtaken(header)
            return False
        if verdict is Verdict.FENCED:
            raise _fenced(header)
        if verdict is Verdict.OUT_OF_ORDER:
            raise _out_of_order(header)
        assert earlier is not None
        self._repeat(earlier)
        return True

    def _repeat(self, earlier: SequencedBatch) -> None:
        """Report the outcome of the batch's first attempt."""
        if self._log.core.await_unconfirmed(earlier.last_offset + 1, self._settle_retry(earlier.base_offset)):
            self._produce.wait()
        else:
            self._results[self._position] = self._result(earlier.base_offset)

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


def _fenced(header: BatchHeader) -> Refused:
    producer = f"producer {header.producer_id} epoch {header.producer_epoch}"
    return Refused(ErrorCode.invalid_producer_epoch, f"{producer} is fenced by a newer epoch")


def _out_of_order(header: BatchHeader) -> Refused:
    producer = f"producer {header.producer_id} epoch {header.producer_epoch}"
    message = f"{producer} sent sequence {header.base_sequence} out of order"
    return Refused(ErrorCode.out_of_order_sequence_number, message)


def _overtaken(header: BatchHeader) -> NotLeader:
    """For a batch that overtook one that was refused or lost before a takeover: the client retries both in order."""
    return NotLeader(f"sequence {header.base_sequence} of producer {header.producer_id} arrived before its predecessor")


def _code_for(code: ErrorCode, version: int) -> ErrorCode:
    """Return the code that a Produce response of ``version`` has for a coordinator's code."""
    if code is ErrorCode.concurrent_transactions:
        return code if version >= ADDING_VERSION else ErrorCode.not_enough_replicas
    if code is ErrorCode.transaction_abortable:
        return code if version >= _ABORTABLE_VERSION else ErrorCode.invalid_txn_state
    return _COORDINATOR_CODES.get(code, code)
