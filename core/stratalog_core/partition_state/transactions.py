"""Transactions of one partition: open ones, aborted ones, and the last stable offset. Sans-IO.

Kafka's rules (KIP-98): a transaction begins in a partition with its producer's first transactional batch there and ends with a
control batch, the marker, which says whether it committed or aborted. The last stable offset is the first offset of the oldest
open transaction. A reader with isolation level ``read_committed`` reads below it and skips the aborted transactions.

The replay starts at a checkpoint, which holds the open transactions and no aborted ones. So the aborted transactions are
complete for reads at or beyond ``aborted_from``: a transaction that overlaps such a read ended after the checkpoint. Their
number is bounded; dropping the oldest raises ``aborted_from``. Earlier ones are in ledgers and segments, not here.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader
from stratalog_core.batches.checkpoint import NO_COORDINATOR_EPOCH, OngoingTransaction
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer

ABORT: Final = 0
COMMIT: Final = 1
_MARKER_KEY: Final = struct.Struct(">hh")
"""Version and type of a control record (Kafka documentation, "Control Batches"); later versions may append fields."""
_MARKER_VALUE: Final = struct.Struct(">hi")
"""Version and coordinator epoch of an ``EndTxnMarker``; later versions may append fields."""


class AbortedTransaction(NamedTuple):
    """A producer's batches from ``first_offset`` on were aborted by the marker at ``last_offset``."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int
    """Value at the marker. Every transaction that ended later begins at or beyond it, so a search can stop here."""


class Aborted(Protocol):
    """An aborted transaction, from the replay or from a segment's footer."""

    @property
    def first_offset(self) -> int: ...
    @property
    def last_offset(self) -> int: ...
    @property
    def last_stable_offset(self) -> int: ...


_Aborted = TypeVar("_Aborted", bound=Aborted)


def aborted_between(aborted: Sequence[_Aborted], start_offset: int, end_offset: int) -> list[_Aborted]:
    """Return those that overlap ``start_offset`` to below ``end_offset``; ``aborted`` is, and they are, in marker order."""
    found = []
    for index in range(bisect_left(aborted, start_offset, key=lambda one: one.last_offset), len(aborted)):
        one = aborted[index]
        if one.first_offset < end_offset:
            found.append(one)
        if one.last_stable_offset >= end_offset:
            break
    return found


class Marker(NamedTuple):
    """The first record of a control batch. ``kind`` is ``ABORT``, ``COMMIT`` or another.

    ``coordinator_epoch`` is the epoch of the transaction coordinator that wrote it, -1 if the record does not tell it.
    """

    kind: int
    coordinator_epoch: int


def read_marker(batch: Buffer, header: BatchHeader) -> Marker:
    """Return the first record of a whole control batch. Raises ``Corrupt``."""
    if len(batch) < header.size_bytes:
        raise Corrupt(f"control batch at offset {header.base_offset} is cut to {len(batch)} of {header.size_bytes} bytes")
    record = next(iterate_records(batch, header), None)
    if record is None or record.key is None or len(record.key) < _MARKER_KEY.size:
        raise Corrupt(f"control batch at offset {header.base_offset} has no control record")
    _, kind = _MARKER_KEY.unpack_from(record.key)
    if kind not in (ABORT, COMMIT) or record.value is None or len(record.value) < _MARKER_VALUE.size:
        return Marker(kind, NO_COORDINATOR_EPOCH)
    _, coordinator_epoch = _MARKER_VALUE.unpack_from(record.value)
    return Marker(kind, coordinator_epoch)


def build_marker(kind: int, producer_id: int, producer_epoch: int, coordinator_epoch: int, timestamp_ms: int) -> bytearray:
    """Return the control batch that ends a producer's transaction in a partition: ``COMMIT`` or ``ABORT``."""
    key, value = _MARKER_KEY.pack(0, kind), _MARKER_VALUE.pack(0, coordinator_epoch)
    record = Record(offset=0, timestamp_ms=timestamp_ms, key=key, value=value)
    attributes = TRANSACTIONAL_BIT | CONTROL_BIT
    return build_batch([record], attributes=attributes, producer_id=producer_id, producer_epoch=producer_epoch)


class LedgerTransactions(NamedTuple):
    """Transactions that a reader of one ledger must know: those aborted in it, in marker order, and those open at its end."""

    aborted: tuple[AbortedTransaction, ...] = ()
    open: tuple[OngoingTransaction, ...] = ()

    def reach_beyond(self, end_offset: int) -> bool:
        """Whether a transaction that begins below ``end_offset`` ends after this ledger."""
        return bool(self.open) and self.open[0].first_offset < end_offset


NO_TRANSACTIONS: Final = LedgerTransactions()


class Transactions:
    """See the module's header. Call ``replay`` in offset order, with confirmed batches only."""

    __slots__ = ("_aborted", "_aborted_max", "aborted_from", "first_offsets")

    def __init__(self, aborted_max: int) -> None:
        self.first_offsets: dict[int, int] = {}
        """Open transactions by producer id, oldest first."""
        self.aborted_from = 0
        """Reads at or beyond this offset find all aborted transactions here."""
        self._aborted: list[AbortedTransaction] = []
        self._aborted_max = aborted_max

    @property
    def has_aborted(self) -> bool:
        """Whether any aborted transaction is known."""
        return bool(self._aborted)

    @property
    def aborted(self) -> tuple[AbortedTransaction, ...]:
        """All known aborted transactions, in marker order."""
        return tuple(self._aborted)

    def load(self, ongoing: Iterable[OngoingTransaction], offset: int) -> None:
        """Replace the state by the open transactions of a checkpoint of ``offset``."""
        in_order = sorted(ongoing, key=lambda one: one.first_offset)
        self.first_offsets.clear()
        self.first_offsets.update((one.producer_id, one.first_offset) for one in in_order)
        self._aborted, self.aborted_from = [], offset

    def replay(self, header: BatchHeader, base_offset: int, batch: Buffer) -> None:
        """Replay a transactional batch; ``batch`` must be whole if it is a control batch. Raises ``Corrupt``."""
        if not header.attributes & CONTROL_BIT:
            self.first_offsets.setdefault(header.producer_id, base_offset)
            return
        kind = read_marker(batch, header).kind
        if kind not in (ABORT, COMMIT):
            return
        first_offset = self.first_offsets.pop(header.producer_id, None)
        if first_offset is None or kind == COMMIT:
            return
        last_offset = base_offset + header.last_offset_delta
        stable = self.last_stable_offset(last_offset + 1)
        self._aborted.append(AbortedTransaction(header.producer_id, first_offset, last_offset, stable))
        if len(self._aborted) > self._aborted_max:
            self.aborted_from = self._aborted.pop(0).last_offset + 1

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the first offset of the oldest open transaction; ``high_watermark`` if none is open."""
        return next(iter(self.first_offsets.values()), high_watermark)

    def aborted_between(self, start_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """Return the aborted transactions that overlap ``start_offset`` to below ``end_offset``, in marker order."""
        return aborted_between(self._aborted, start_offset, end_offset)

    def since(self, base_offset: int) -> LedgerTransactions:
        """Return what a ledger that began at ``base_offset`` and ends here says of transactions.

        All transactions aborted at or beyond ``base_offset`` must be known here.
        """
        if not self._aborted and not self.first_offsets:
            return NO_TRANSACTIONS
        first = bisect_left(self._aborted, base_offset, key=lambda one: one.last_offset)
        return LedgerTransactions(tuple(self._aborted[first:]), self.snapshot())

    def snapshot(self) -> tuple[OngoingTransaction, ...]:
        """Return the open transactions, oldest first, for a checkpoint."""
        return tuple(OngoingTransaction(producer_id, first) for producer_id, first in self.first_offsets.items())

    def validate_state(self) -> None:
        """Assert the bound and the orders; O(transactions)."""
        firsts = list(self.first_offsets.values())
        assert firsts == sorted(firsts), "open transactions are in the order of their first offsets"
        assert len(self._aborted) <= self._aborted_max
        ends = [one.last_offset for one in self._aborted]
        assert ends == sorted(ends), "aborted transactions are in marker order"
        assert not ends or ends[0] >= self.aborted_from
