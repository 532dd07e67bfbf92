"""The client's parameters and callbacks: the specification of a new ledger, and the listener of its writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from stratalog_core.errors import StratalogError


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpec:
    """A ledger to create. E >= Qw >= Qa >= 1; ``base_offset`` is the offset of its first record."""

    topic_id: UUID
    partition: int
    base_offset: int
    leader_epoch: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int


class LedgerListener(Protocol):
    """Receives the progress of a writer's entries: synchronously from the event loop, in order."""

    def on_first_copy(self, entry_id: int) -> None:
        """One bookie has the entry durably, and every earlier entry has been reported (acks=1).

        Called once per entry, unless ``LedgerWriter.tell_first_copies`` turned it off.
        """
        ...

    def on_confirmed(self, lac: int) -> None:
        """Qa bookies have every entry up to ``lac`` durably (acks=all). Called after ``on_first_copy`` of the same entries."""
        ...

    def on_failed(self, error: StratalogError) -> None:
        """The writer failed. Called once, as the last call. Only recovery can decide which unconfirmed entries exist.

        ``LedgerFenced`` or ``StaleEpoch``: another owner took over. ``OutcomeUnknown``: Qa bookies were unreachable for too
        long. ``Corrupt``: a bookie holds a different entry, or the payload was changed after the append.
        """
        ...
