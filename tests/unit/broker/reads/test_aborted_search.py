"""The search for aborted transactions through sealed ledgers, some of which are empty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_broker.reads.aborted_transactions import _Search
from stratalog_core.batches.checkpoint import OngoingTransaction
from stratalog_core.partition_state.transactions import AbortedTransaction, LedgerTransactions


def index_of(base_offset: int, end_offset: int, transactions: LedgerTransactions) -> LedgerIndex:
    index = LedgerIndex(base_offset)
    for offset in range(base_offset, end_offset):
        index.append(offset, offset, offset + 1, 0, 100)
    index.transactions = transactions
    return index


def test_a_search_goes_on_after_a_ledger_that_is_empty() -> None:
    """A takeover may leave an empty ledger between the batches of a transaction and its marker."""
    log: Any = SimpleNamespace(core=None)
    search = _Search(log, 12, 13)
    aborted = AbortedTransaction(1001, 12, 13, 13)
    assert search.goes_on_after(index_of(12, 13, LedgerTransactions((), (OngoingTransaction(1001, 12),))))
    assert search.goes_on_after(index_of(13, 13, LedgerTransactions()))
    assert not search.goes_on_after(index_of(13, 20, LedgerTransactions((aborted,), ())))
    assert search.found == [aborted]
