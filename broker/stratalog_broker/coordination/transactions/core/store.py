"""The contents of a partition of ``__transaction_state``: the last durable value of each transactional id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from stratalog_broker.coordination.replay import ApplyRecord, decode_snapshot
from stratalog_broker.coordination.transactions.core.records import decode_key, decode_value
from stratalog_broker.coordination.transactions.core.transaction import Transaction
from stratalog_core.batches.batch import NO_PRODUCER_ID
from stratalog_core.batches.records import Header

SNAPSHOT_VERSION: Final = 1


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot format. Fields may be added with defaults; a change of meaning needs a new version."""

    version: int
    transactions: tuple[Transaction, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Snapshot)


class TransactionStore:
    """Transactions by transactional id; a ``CoordinatorState``."""

    def __init__(self) -> None:
        self.transactions: dict[str, Transaction] = {}

    def begin_batch(self, producer_id: int = NO_PRODUCER_ID) -> ApplyRecord:
        return self._apply

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        """No transaction writes to this topic: a marker has no meaning."""

    def _apply(self, key: bytes, value: bytes | None, headers: Sequence[Header]) -> None:
        transactional_id = decode_key(key)
        if transactional_id is None:
            return
        if value is None:
            self.transactions.pop(transactional_id, None)
        else:
            self.transactions[transactional_id] = decode_value(transactional_id, value, headers)

    def snapshot(self) -> bytes:
        """Return the whole content as msgpack (docs/reference/formats/transaction-state.md)."""
        return _encoder.encode(_Snapshot(version=SNAPSHOT_VERSION, transactions=tuple(self.transactions.values())))

    @classmethod
    def from_snapshot(cls, content: bytes | None) -> TransactionStore:
        """Return the store of a snapshot, empty for None. Raises ``Corrupt`` for malformed content and unknown versions."""
        store = cls()
        if content is None:
            return store
        snapshot = decode_snapshot(_decoder, content, SNAPSHOT_VERSION, "transactions")
        store.transactions = {each.transactional_id: each for each in snapshot.transactions}
        return store


def restore_transactional_ids(state: bytes | None) -> bytes | None:
    """Return a coordinator's state of the past as it is to be restored. Raises ``Corrupt``."""
    if state is None:
        return None
    store = TransactionStore.from_snapshot(state)
    store.transactions = {transactional_id: each.restored() for transactional_id, each in store.transactions.items()}
    return store.snapshot()


def unfinished_producers(state: bytes | None, topic: str) -> Iterator[int]:
    """Yield the ids of producers whose transactions in a topic are in progress. Raises ``Corrupt``."""
    for each in TransactionStore.from_snapshot(state).transactions.values():
        if any(name == topic for name, _ in each.partitions):
            yield each.producer_id
