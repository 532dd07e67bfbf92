"""What a partition's owner must know at an offset, replayed from a checkpoint and the batches after it. Sans-IO.

The state is next offset, leader epochs, idempotent producers and transactions. There is one replay for all that need it:
the owner adds the batches it appends, a takeover replays the headers of what the last owner left, and an offload replays the
ledgers of a segment for the segment's footer. A replay of all batches equals a replay from any checkpoint on.

Everything is bounded: producers, their batches, leader epochs and aborted transactions. Of the open transactions there is one
for each producer at the most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stratalog_core.batches.batch import TRANSACTIONAL_BIT, BatchHeader
from stratalog_core.batches.checkpoint import Checkpoint, EpochStart
from stratalog_core.errors import Corrupt
from stratalog_core.partition_state.producer_states import Displaced, ProducerStates
from stratalog_core.partition_state.transactions import Transactions
from stratalog_core.ports import Buffer

PRODUCERS_MAX: Final = 100_000
"""Idempotent producers of a partition, whatever the owner is configured to: 128 MB as Python objects."""
EPOCHS_MAX: Final = 10_000
"""Leader epochs kept, the newest ones."""
ABORTED_MAX: Final = 100_000
"""Aborted transactions kept, the newest ones: at least those of one ledger."""


class ReplayState:
    """State when all batches below ``next_offset``, and no other, have been replayed.

    An owner goes on from there: it adds batches to ``producers`` when it appends them, to ``transactions`` when the quorum has
    confirmed them, and keeps offsets of its own.
    """

    __slots__ = ("_epochs_max", "leader_epochs", "next_offset", "producers", "transactions")

    def __init__(
        self,
        next_offset: int = 0,
        *,
        producers_max: int = PRODUCERS_MAX,
        epochs_max: int = EPOCHS_MAX,
        aborted_max: int = ABORTED_MAX,
    ) -> None:
        self.next_offset = next_offset
        self.leader_epochs: list[EpochStart] = []
        """Oldest first, each with the offset of its first batch."""
        self.transactions = Transactions(aborted_max)
        """As of the confirmed batches."""
        self.producers = ProducerStates(producers_max, self.transactions.first_offsets)
        self._epochs_max = epochs_max

    # -- replay of what is stored --------------------------------------------------------------------------------------

    def load(self, checkpoint: Checkpoint) -> None:
        """Replace everything by a checkpoint's content, within the bounds."""
        self.next_offset = checkpoint.offset
        # An owner enters its epoch before it has written anything; the epoch's first batch enters it here.
        begun = [start for start in checkpoint.leader_epochs if start.start_offset < checkpoint.offset]
        self.leader_epochs = begun[-self._epochs_max :]
        self.transactions.load(checkpoint.transactions, checkpoint.offset)
        self.producers.load(checkpoint.producers)

    def skip_to(self, offset: int) -> None:
        """The log goes on at ``offset``: a ledger begins there, or retention has removed what was below."""
        self.next_offset = max(self.next_offset, offset)

    def replay(self, header: BatchHeader, batch: Buffer) -> None:
        """Take in a stored batch. Only of a control batch is more needed than the header: ``batch`` must be whole then.

        Raises ``Corrupt`` if it does not continue at ``next_offset``, or for a malformed marker.
        """
        base_offset = header.base_offset
        if base_offset != self.next_offset:
            raise Corrupt(f"batch at offset {base_offset} does not continue at {self.next_offset}")
        self.begin_epoch(header.leader_epoch, base_offset)
        if header.producer_id >= 0:
            self.producers.appended(header, base_offset)
            if header.attributes & TRANSACTIONAL_BIT:
                self.transactions.replay(header, base_offset, batch)
        self.next_offset = header.next_offset

    def begin_epoch(self, epoch: int, offset: int) -> None:
        """``epoch`` wrote from ``offset`` on, if it is newer than all before."""
        epochs = self.leader_epochs
        if not epochs or epochs[-1].epoch < epoch:
            epochs.append(EpochStart(epoch, offset))
            del epochs[: -self._epochs_max]

    def forget_below(self, log_start_offset: int) -> None:
        """Drop the leader epochs of which retention has left nothing."""
        gone = sum(following.start_offset <= log_start_offset for following in self.leader_epochs[1:])
        del self.leader_epochs[:gone]

    # -- what others need of it ----------------------------------------------------------------------------------------

    def checkpoint(self, offset: int, unconfirmed: Iterable[tuple[int, Displaced]] = ()) -> Checkpoint:
        """The state at ``offset``, before the ``unconfirmed`` ones: producer id and what it displaced, latest first."""
        return Checkpoint(
            offset=offset,
            leader_epochs=tuple(self.leader_epochs),
            producers=self.producers.snapshot(unconfirmed),
            transactions=self.transactions.snapshot(),
        )

    def validate_state(self) -> None:
        """Assert the bounds and orders of everything; O(state)."""
        epochs = [start.epoch for start in self.leader_epochs]
        assert epochs == sorted(set(epochs)), "leader epochs rise"
        starts = [start.start_offset for start in self.leader_epochs]
        assert starts == sorted(starts), "leader epochs begin in offset order"
        assert len(epochs) <= self._epochs_max
        self.transactions.validate_state()
        self.producers.validate_state()
