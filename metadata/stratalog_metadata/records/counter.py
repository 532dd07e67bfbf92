"""Counters that allocate ids. An id is allocated once."""

from __future__ import annotations

from stratalog_metadata.records.base import RecordBase


class Counter(RecordBase, frozen=True, kw_only=True, tag="counter"):
    """``next_value`` is the first id that has not been allocated.

    ``lost_below`` is greater than 0 only for ledger ids, and only after metadata was restored from an old copy: ids below it
    may have been allocated after the copy was made. No new ledger gets such an id, and no bookie deletes a ledger of such an
    id because it has no record.
    """

    name: str
    next_value: int = 0
    lost_below: int = 0

    def key(self) -> str:
        return counter_key(self.name)


LEDGER_IDS = "ledger_ids"
PRODUCER_IDS = "producer_ids"
SESSION_IDS = "session_ids"


def counter_key(name: str) -> str:
    return f"counter/{name}"
