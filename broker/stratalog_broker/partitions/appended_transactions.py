"""Transactions of one partition after its last appended batch, confirmed or not: the next batch is checked against them.

The first batch of a transaction in a partition is appended only after the transaction's coordinator has verified (or, from
transaction version 2 on, noted) that the partition belongs to it: KIP-890. Until its response arrives, the
producer has a guard. A marker removes the guard, and so does the first batch: a response that arrives after either is stale,
because the transaction that it is about may have ended. Later batches of the transaction need no response. Sans-IO.

Batches that wait for their coordinators may overtake each other. The guard remembers the lowest sequence of those that asked:
only that one may be the transaction's first, as in Kafka. So a guard stays after a refusal, which the producer may retry. If
the producer never asks again, the guard goes when the producer's state would.
"""

from __future__ import annotations

from collections.abc import Mapping

from stratalog_core.batches.batch import CONTROL_BIT, BatchHeader
from stratalog_core.partition_state.transactions import ABORT, COMMIT, read_marker
from stratalog_core.ports import Buffer


class VerificationGuard:
    """Stands while a producer's first batch of a transaction waits for the coordinator's response.

    ``period``: the period in which a batch has asked last.
    """

    __slots__ = ("epoch", "lowest_sequence", "period")

    def __init__(self, header: BatchHeader) -> None:
        self.epoch = header.producer_epoch
        self.lowest_sequence = header.base_sequence
        self.period = 0


class AppendedTransactions:
    """See the module's header. ``first_offsets`` are those of the open transactions after the confirmed batches."""

    __slots__ = ("_guards", "_guards_max", "_period", "first_offsets")

    def __init__(self, first_offsets: Mapping[int, int], guards_max: int) -> None:
        self.first_offsets = dict(first_offsets)
        """First offset of each open transaction, by producer id."""
        self._guards: dict[int, VerificationGuard] = {}
        self._guards_max = guards_max
        self._period = 0

    def appended(self, header: BatchHeader, base_offset: int, batch: Buffer) -> None:
        """Add a transactional batch; ``batch`` must be whole if it is a control batch. Raises ``Corrupt``."""
        self._guards.pop(header.producer_id, None)
        if not header.attributes & CONTROL_BIT:
            self.first_offsets.setdefault(header.producer_id, base_offset)
        elif read_marker(batch, header).kind in (ABORT, COMMIT):
            self.first_offsets.pop(header.producer_id, None)

    def guard(self, header: BatchHeader) -> VerificationGuard:
        """Return the guard for a batch that begins a transaction; the oldest guard is dropped if there are too many."""
        guard = self._guards.get(header.producer_id)
        if guard is None or guard.epoch < header.producer_epoch:
            guard = self._guards[header.producer_id] = VerificationGuard(header)
            if len(self._guards) > self._guards_max:
                del self._guards[next(iter(self._guards))]
        elif guard.epoch == header.producer_epoch and header.base_sequence < guard.lowest_sequence:
            guard.lowest_sequence = header.base_sequence
        guard.period = self._period
        return guard

    def end_period(self, periods: int) -> None:
        """Begin another period; remove the guards for which no batch has asked during the last ``periods``."""
        self._period += 1
        silent_until = self._period - periods
        for producer_id in [each for each, guard in self._guards.items() if guard.period < silent_until]:
            del self._guards[producer_id]

    def is_standing(self, producer_id: int, guard: VerificationGuard) -> bool:
        """Whether nothing has ended or begun a transaction of the producer since ``guard`` was returned."""
        return self._guards.get(producer_id) is guard
