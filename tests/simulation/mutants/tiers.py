"""Planted faults of reads that switch between hot and cold copies, and of expiry without the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stratalog_broker.reads.log_reader import LogReader
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, is_sealed
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.maintenance import hot_expiry


def cold_copies_are_never_tried() -> None:
    """A ledger that is on bookies is read only from them."""
    LogReader._has_cold_copy = lambda *args: False  # type: ignore[method-assign]


def hot_ledgers_expire_whatever_their_age() -> None:
    """Without the store every sealed ledger but the newest is removed."""

    def all_but_the_newest(
        state: PartitionSnapshot, policy: TierPolicy, newest_ms: Mapping[int, int], now_ms: int
    ) -> tuple[StoredLedger, ...]:
        sealed = [stored for stored in state.ledgers[:-1] if is_sealed(stored.ledger)]
        return tuple(sealed)

    hot_expiry.expired_ledgers = all_but_the_newest  # type: ignore[attr-defined]


IN_OUTAGES: Final = (
    cold_copies_are_never_tried,
    hot_ledgers_expire_whatever_their_age,
)
