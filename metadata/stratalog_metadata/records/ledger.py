"""A ledger: where its entries are and whether it is closed."""

from __future__ import annotations

from enum import StrEnum
from uuid import UUID

import msgspec

from stratalog_metadata.records.base import RecordBase


class LedgerState(StrEnum):
    """OPEN takes adds of its one writer; IN_RECOVERY is being closed by another; CLOSED keeps its entries for ever.
    Under a higher epoch of its partition an OPEN one is closed without IN_RECOVERY between.

    Of a closed ledger's record only the bookies of its fragments may change: when re-replication has brought the entries of
    one to another.
    """

    OPEN = "open"
    IN_RECOVERY = "in_recovery"
    CLOSED = "closed"


class Fragment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Entries from ``first_entry`` on are striped over these bookies, until the next fragment's first entry."""

    first_entry: int
    bookies: tuple[str, ...]


class Ledger(RecordBase, frozen=True, kw_only=True, tag="ledger"):
    """``last_entry`` (-1: empty) and ``payload_bytes`` (sum of entry payloads) count only once CLOSED.

    ``closed_at_ms`` is wall time, for retention of the hot copy. ``base_offset`` and ``leader_epoch`` repeat the log's
    reference, so that a ledger explains itself.
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

    def key(self) -> str:
        return ledger_key(self.ledger_id)

    @property
    def ensemble_size(self) -> int:
        return len(self.fragments[0].bookies)


def ledger_key(ledger_id: int) -> str:
    return f"ledger/{ledger_id:016x}"
