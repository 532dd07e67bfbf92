"""Counters that allocate ids. An id is allocated once."""

from __future__ import annotations

from stratalog_metadata.records.base import RecordBase


class Counter(RecordBase, frozen=True, kw_only=True, tag="counter"):
    """``next_value`` is the first id that has not been allocated.

    ``lost_below`` is greater than 0 only for ledger ids, and only after metadata was restored from an old copy: ids below it
    may have been allocated after the copy was made. No new ledger gets such an id, and no bookie deletes a ledger of such an
    id because it has no record, unless it is one of the ``KnownLedgers``.
    """

    name: str
    next_value: int = 0
    lost_below: int = 0

    def key(self) -> str:
        return counter_key(self.name)


class KnownLedgers(RecordBase, frozen=True, kw_only=True, tag="known_ledgers"):
    """The ids, ascending, of all ledgers that a copy knew from which metadata was restored.

    One of them that has no record any more was deleted since. Others below ``lost_below`` may have been lost.
    """

    ledger_ids: tuple[int, ...] = ()

    def key(self) -> str:
        return KNOWN_LEDGERS_KEY


KNOWN_LEDGERS_KEY = "known_ledgers/"
LEDGER_IDS = "ledger_ids"
PRODUCER_IDS = "producer_ids"
SESSION_IDS = "session_ids"


def counter_key(name: str) -> str:
    return f"counter/{name}"
