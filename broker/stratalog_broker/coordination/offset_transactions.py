"""Admits the offsets of transactions to the partitions of ``__consumer_offsets``, with the rules of produced batches (KIP-890).

The first offsets of a transaction in a partition wait for the transaction's coordinator, behind a guard that a marker removes:
offsets that arrive after the end of their transaction would otherwise begin another one that nobody ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.coordination.record_writer import TransactionalProducer
from stratalog_broker.coordination.transaction_verification import Transaction, TransactionVerifier
from stratalog_broker.partitions.appended_transactions import VerificationGuard
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.batches.batch import TRANSACTIONAL_BIT, BatchHeader, read_header
from stratalog_core.batches.records import Record, build_batch

_GROUP_KEY_TYPE: Final = 0
_NOT_ASKED: Final = (ErrorCode.network_exception, ErrorCode.not_coordinator)
"""Answers if the transaction's coordinator could not be asked: it has moved, or is not reached."""


class OffsetTransactions:
    """One instance per broker."""

    def __init__(self, locator: CoordinatorLocator, partitions: Partitions, verifier: TransactionVerifier) -> None:
        self._locator = locator
        self._partitions = partitions
        self._verifier = verifier

    @staticmethod
    def producer_of(transaction: Transaction) -> TransactionalProducer:
        return TransactionalProducer(transaction.producer_id, transaction.producer_epoch)

    async def admit(self, transaction: Transaction, group_id: str) -> Callable[[], None]:
        """Return the check to make immediately before the group's offsets are appended; it raises ``KafkaError``.

        Raises ``KafkaError`` with the answer of the transaction's coordinator if the group does not belong to the transaction;
        COORDINATOR_LOAD_IN_PROGRESS if that coordinator cannot be asked now. NOT_COORDINATOR is always about the group.
        """
        topic, index = self._locator.partition(_GROUP_KEY_TYPE, group_id)
        log = self._partitions.find_by_name(topic.encode(), index)
        if log is None:
            raise KafkaError(ErrorCode.not_coordinator)
        header = _header_of(transaction)
        if log.core.has_open_transaction(header):
            return lambda: _check(log, header, None)
        _check_epoch(log, header)
        answer, guard = await self._verifier.ask(transaction, log, header)
        if answer in _NOT_ASKED:
            raise KafkaError(ErrorCode.coordinator_load_in_progress)
        if answer is not ErrorCode.none:
            raise KafkaError(answer)
        return lambda: _check(log, header, guard)


def _check(log: PartitionLog, header: BatchHeader, guard: VerificationGuard | None) -> None:
    """Raise ``KafkaError`` unless the transaction is open or may begin in the partition."""
    if not log.is_serving:
        raise KafkaError(ErrorCode.not_coordinator)
    if log.core.has_open_transaction(header):
        return
    _check_epoch(log, header)
    if guard is None or not log.core.appended_transactions.is_standing(header.producer_id, guard):
        raise KafkaError(ErrorCode.invalid_txn_state, "the transaction has ended")


def _check_epoch(log: PartitionLog, header: BatchHeader) -> None:
    if log.core.producers.epoch_of(header.producer_id) > header.producer_epoch:
        raise KafkaError(ErrorCode.invalid_producer_epoch, f"producer {header.producer_id} is fenced by a newer epoch")


def _header_of(transaction: Transaction) -> BatchHeader:
    """Return the header of a batch of the transaction, without a sequence, as its checks need it."""
    batch = build_batch(
        [Record(offset=0, timestamp_ms=0, key=None, value=None)],
        attributes=TRANSACTIONAL_BIT,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
    )
    return read_header(batch)
