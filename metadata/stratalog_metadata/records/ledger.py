"""Ledgers: where their entries are, and whether they are closed."""

from __future__ import annotations

from enum import StrEnum
from typing import Final
from uuid import UUID

import msgspec

from stratalog_metadata.records.base import RecordBase


class LedgerState(StrEnum):
    """OPEN takes entries of its one writer; IN_RECOVERY is being closed by another process; CLOSED is final.

    Under a higher epoch of its partition an OPEN ledger is closed without IN_RECOVERY. Of a closed ledger's record only the
    bookies of its fragments change, when re-replication has copied a bookie's entries to another.
    """

    OPEN = "open"
    IN_RECOVERY = "in_recovery"
    CLOSED = "closed"


class Fragment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The bookies of the entries from ``first_entry`` up to the next fragment's first entry."""

    first_entry: int
    bookies: tuple[str, ...]


NONE_UNDECIDED: Final = -1
UNKNOWN_UNDECIDED: Final = -2


class Ledger(RecordBase, frozen=True, kw_only=True, tag="ledger"):
    """``last_entry`` (-1: empty) and ``payload_bytes`` (sum of entry payloads) are valid once CLOSED.

    ``closed_at_ms`` is wall time, for retention of the hot copy. ``base_offset`` and ``leader_epoch`` repeat the log's
    reference, so that the record is self-contained. ``undecided_from`` is the first offset of the oldest transaction that was
    open at the end of a CLOSED ledger: ``NONE_UNDECIDED``, or ``UNKNOWN_UNDECIDED`` if recovery closed it.
    """

    ledger_id: int
    topic_id: UUID
    partition: int
    base_offset: int
    leader_epoch: int
    write_quorum: int
    ack_quorum: int
    fragments: tuple[Fragment, ...]
    state: LedgerState = LedgerState.OPEN
    last_entry: int = -1
    payload_bytes: int = 0
    end_offset: int = -1
    closed_at_ms: int = 0
    undecided_from: int = NONE_UNDECIDED

    def key(self) -> str:
        return ledger_key(self.ledger_id)

    @property
    def ensemble_size(self) -> int:
        return len(self.fragments[0].bookies)


def ledger_key(ledger_id: int) -> str:
    return f"ledger/{ledger_id:016x}"
