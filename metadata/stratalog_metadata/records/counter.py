"""Counters that hand out ids, never the same twice."""

from __future__ import annotations

from stratalog_metadata.records.base import RecordBase


class Counter(RecordBase, frozen=True, kw_only=True, tag="counter"):
    """``next_value`` is the first id that has not been handed out."""

    name: str
    next_value: int = 0

    def key(self) -> str:
        return counter_key(self.name)


LEDGER_IDS = "ledger_ids"
PRODUCER_IDS = "producer_ids"
SESSION_IDS = "session_ids"


def counter_key(name: str) -> str:
    return f"counter/{name}"
