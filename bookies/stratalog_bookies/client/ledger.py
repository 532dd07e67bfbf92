"""What users of the client hand in and get told: the specification of a new ledger, and the listener of its writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from stratalog_core.errors import StratalogError


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpec:
    """A ledger to open. E >= Qw >= Qa >= 1; ``base_offset`` is the offset that its first record will have."""

    topic_id: UUID
    partition: int
    base_offset: int
    leader_epoch: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int


class LedgerListener(Protocol):
    """Told, synchronously from the event loop and in order, how a writer's entries fare."""

    def on_first_copy(self, entry_id: int) -> None:
        """One bookie has the entry durably, and each entry before it has been reported (acks=1). Once for every entry,
        unless the listener has no use for it: see ``LedgerWriter.tell_first_copies``.
        """
        ...

    def on_confirmed(self, lac: int) -> None:
        """Qa bookies have every entry up to ``lac`` durably (acks=all). After ``on_first_copy`` of the same entries."""
        ...

    def on_failed(self, error: StratalogError) -> None:
        """The writer is dead; called once, and nothing after it. Which unconfirmed entries exist only recovery can say.

        ``LedgerFenced`` or ``StaleEpoch``: somebody took over. ``OutcomeUnknown``: Qa bookies were out of reach for too long.
        ``Corrupt``: a bookie holds another entry, or the payload was changed under way.
        """
        ...
