"""The search for aborted transactions: through sealed ledgers, some of them empty, and in history that is being removed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_broker.reads.aborted_transactions import AbortedTransactions, _Search
from stratalog_core.batches.checkpoint import OngoingTransaction
from stratalog_core.errors import Unavailable
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


class _Moving:
    """A log reader whose history moves while batches that were read before are searched."""

    def __init__(self, start_offset: int, end_offset: int) -> None:
        self._pointer = SimpleNamespace(start_offset=start_offset, end_offset=end_offset)

    def hot_ledger_at(self, log: Any, offset: int) -> None: ...

    def is_cold(self, log: Any, offset: int) -> bool:
        return True

    def manifest_pointer(self, log: Any) -> Any:
        return self._pointer


class _Segments:
    """Cold history without aborted transactions."""

    def cached_aborted_transactions(self, pointer: Any, from_offset: int, to_offset: int) -> list[Any]:
        return []

    async def aborted_transactions(self, pointer: Any, from_offset: int, to_offset: int) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("start_offset", "end_offset"),
    [(17, 17), (12, 17), (12, 30), (0, 9), (0, 5)],
    ids=["all removed", "start between", "start between, more behind", "hot ledgers trimmed", "hot ledgers trimmed long since"],
)
async def test_what_was_aborted_in_removed_history_is_unknown(start_offset: int, end_offset: int) -> None:
    """Retention or DeleteRecords removes offsets 9 to 17 after their batches were read: they must not be served."""
    log: Any = SimpleNamespace(core=SimpleNamespace(aborted_from=20), topic_partition="flights-0")
    reader: Any = _Moving(start_offset, end_offset)
    cold: Any = _Segments()
    aborted = AbortedTransactions(reader, cold)
    assert aborted.at_once(log, 9, 17) is None
    with pytest.raises(Unavailable, match="flights-0 at offset 9"):
        await aborted.find(log, 9, 17)
