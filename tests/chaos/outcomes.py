"""Outcomes of transactions and records, as far as their producers know them. The simulator shares this with the chaos runs."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The outcome of a transaction, or of a record."""

    ABORTED = "aborted"
    COMMITTED = "committed"
    UNKNOWN = "unknown"
