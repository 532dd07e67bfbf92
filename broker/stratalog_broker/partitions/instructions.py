"""Instructions of a partition's core to its shell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_core.batches.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNext:
    """Open a ledger at the checkpoint's offset, write the checkpoint first, then report ``opened``."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Seal the ledger at ``end_offset``; all of its batches are confirmed. No event reports completion."""

    ledger_id: int
    end_offset: int
    undecided_from: int
    """See the ledger's record."""
    index: LedgerIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Append the queue's first batch to the open ledger, then report ``written``; if the writer is full, ``room`` later."""

    batch: memoryview


Instruction = OpenNext | Seal | Write
NOTHING: Final[Sequence[Instruction]] = ()
