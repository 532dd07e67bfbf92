"""Planted faults of transactions in partitions: last stable offset, aborted transactions, markers, what is offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from stratalog_broker.handlers import write_txn_markers
from stratalog_broker.partitions.core import PartitionCore
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.pending_batch import Acks
from stratalog_core.batches.batch import BatchHeader, read_header
from stratalog_core.partition_state.producer_states import ProducerStates, Verdict
from stratalog_core.partition_state.transactions import LedgerTransactions, Transactions
from stratalog_tiering.core.offload_job import OffloadJob
from stratalog_tiering.maintenance import hot_expiry


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def last_stable_offset_is_the_high_watermark() -> None:
    """Readers of committed records read beyond open transactions."""
    _swap(PartitionCore, "_find_unstable", lambda self: None)


def takeovers_forget_open_transactions() -> None:
    """The open transactions of a checkpoint are not loaded."""
    load: Callable[..., None] = Transactions.load
    _swap(Transactions, "load", lambda self, ongoing, offset: load(self, (), offset))


def takeovers_forget_producers() -> None:
    """The producers of a checkpoint are not loaded: a retry is appended again."""
    _swap(ProducerStates, "load", lambda self, entries: None)


def late_batches_are_appended() -> None:
    """A batch of an earlier epoch is taken for one of the present epoch."""
    judge: Callable[..., Any] = ProducerStates.judge

    def lenient(self: ProducerStates, header: BatchHeader) -> Any:
        verdict, earlier = judge(self, header)
        return (Verdict.APPEND, None) if verdict is Verdict.FENCED else (verdict, earlier)

    def is_open(self: PartitionCore, header: BatchHeader) -> bool:
        return header.producer_id in self.appended_transactions.first_offsets

    _swap(ProducerStates, "judge", lenient)
    _swap(PartitionCore, "has_open_transaction", is_open)


def ledger_indexes_forget_an_aborted_transaction() -> None:
    """The index of a sealed ledger lacks the last transaction that was aborted in it."""
    since: Callable[..., LedgerTransactions] = Transactions.since

    def without_last(self: Transactions, base_offset: int) -> LedgerTransactions:
        found = since(self, base_offset)
        return found._replace(aborted=found.aborted[:-1])

    _swap(Transactions, "since", without_last)


def aborted_transactions_are_looked_up_in_one_ledger() -> None:
    """A transaction that was aborted in a later ledger is not found."""
    _swap(LedgerTransactions, "reach_beyond", lambda self, end_offset: False)


def markers_are_answered_before_the_quorum_has_them() -> None:
    """A marker is acknowledged to its coordinator although the partition's next owner may not find it."""

    async def append(log: PartitionLog, batch: bytearray) -> int:
        return log.append(memoryview(batch), read_header(batch), Acks.ALL, None)

    _swap(write_txn_markers, "append_now", append)


def undecided_transactions_are_offloaded() -> None:
    """A segment is made without knowing how the transactions end that are open at its end."""
    _swap(OffloadJob, "_is_decided", property(lambda self: self._end_state is not None))

    def none(self: OffloadJob) -> Iterable[Any]:
        return []

    _swap(OffloadJob, "_undecided", none)


def the_last_ledger_with_records_expires() -> None:
    """The ledgers that retention leaves are taken to hold the partition's state, although they may be empty."""

    async def hold_state(ports: Any, ledgers: Any) -> bool:
        return True

    _swap(hot_expiry, "_hold_state", hold_state)


IN_TRANSACTIONS: Final = (
    last_stable_offset_is_the_high_watermark,
    takeovers_forget_open_transactions,
    takeovers_forget_producers,
    late_batches_are_appended,
    ledger_indexes_forget_an_aborted_transaction,
    aborted_transactions_are_looked_up_in_one_ledger,
    markers_are_answered_before_the_quorum_has_them,
    undecided_transactions_are_offloaded,
    the_last_ledger_with_records_expires,
)
