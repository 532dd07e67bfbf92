"""State of a partition at an offset, replayed from a checkpoint and the batches after it. Sans-IO.

The state is next offset, leader epochs, idempotent producers and transactions. All users share this replay: the owner adds the
batches it appends, a takeover replays the headers of the previous owner's batches, and an offload replays the ledgers of a
segment for the segment's footer. A replay of all batches gives the same state as a replay from any checkpoint on.

Producers, their batches, leader epochs and aborted transactions are bounded. Each producer has at most one open transaction.
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
"""Maximum of idempotent producers of a partition, whatever the owner's setting: 128 MB as Python objects."""
EPOCHS_MAX: Final = 10_000
"""Leader epochs kept, the newest ones."""
ABORTED_MAX: Final = 100_000
"""Aborted transactions kept, the newest ones: at least those of one ledger."""


class ReplayState:
    """State after replaying all batches below ``next_offset`` and no others.

    An owner continues from this state: it adds batches to ``producers`` when it appends them, to ``transactions`` when the
    quorum has confirmed them, and keeps its own offsets.
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
        """State after the confirmed batches."""
        self.producers = ProducerStates(producers_max, self.transactions.first_offsets)
        self._epochs_max = epochs_max

    # -- replay of what is stored --------------------------------------------------------------------------------------

    def load(self, checkpoint: Checkpoint) -> None:
        """Replace the state by a checkpoint's, within the bounds."""
        self.next_offset = checkpoint.offset
        # An owner adds its epoch before it has written a batch; skip it, because replaying its first batch adds it here.
        begun = [start for start in checkpoint.leader_epochs if start.start_offset < checkpoint.offset]
        self.leader_epochs = begun[-self._epochs_max :]
        self.transactions.load(checkpoint.transactions, checkpoint.offset)
        self.producers.load(checkpoint.producers)

    def restart_at(self, offset: int) -> None:
        """Continue at ``offset`` after a gap: retention has removed the batches in it, and the state after them is gone, too.

        Producers and their transactions are forgotten, as they may have gone on in the gap: an unknown producer may begin at
        any sequence, but one that is known by an earlier batch would be refused for good. Leader epochs before the gap stay.
        """
        assert offset > self.next_offset, "batches are missing"
        self.next_offset = offset
        self.transactions.load((), offset)
        self.producers.load(())

    def replay(self, header: BatchHeader, batch: Buffer) -> None:
        """Replay a stored batch. ``batch`` must be whole if it is a control batch; else its header is enough.

        Raises ``Corrupt`` if it does not begin at ``next_offset``, or for a malformed marker.
        """
        base_offset = header.base_offset
        if base_offset != self.next_offset:
            raise Corrupt(f"batch at offset {base_offset} does not continue at {self.next_offset}")
        self.begin_epoch(header.leader_epoch, base_offset)
        if header.producer_id >= 0:
            self.producers.appended(header, base_offset, batch)
            if header.attributes & TRANSACTIONAL_BIT:
                self.transactions.replay(header, base_offset, batch)
        self.next_offset = header.next_offset

    def begin_epoch(self, epoch: int, offset: int) -> None:
        """Add ``epoch`` as beginning at ``offset``, if it is newer than all known ones."""
        epochs = self.leader_epochs
        if not epochs or epochs[-1].epoch < epoch:
            epochs.append(EpochStart(epoch, offset))
            del epochs[: -self._epochs_max]

    def forget_below(self, log_start_offset: int) -> None:
        """Drop the leader epochs whose batches retention has all removed."""
        gone = sum(following.start_offset <= log_start_offset for following in self.leader_epochs[1:])
        del self.leader_epochs[:gone]

    # -- checkpoint and validation -------------------------------------------------------------------------------------

    def checkpoint(self, offset: int, unconfirmed: Iterable[tuple[int, Displaced]] = ()) -> Checkpoint:
        """Return the state at ``offset``, without the ``unconfirmed`` batches; see ``ProducerStates.snapshot``."""
        return Checkpoint(
            offset=offset,
            leader_epochs=tuple(self.leader_epochs),
            producers=self.producers.snapshot(unconfirmed),
            transactions=self.transactions.snapshot(),
        )

    def validate_state(self) -> None:
        """Assert all bounds and orders; O(state)."""
        epochs = [start.epoch for start in self.leader_epochs]
        assert epochs == sorted(set(epochs)), "leader epochs rise"
        starts = [start.start_offset for start in self.leader_epochs]
        assert starts == sorted(starts), "leader epochs begin in offset order"
        assert len(epochs) <= self._epochs_max
        self.transactions.validate_state()
        self.producers.validate_state()
