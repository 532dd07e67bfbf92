"""The batches that the application of an internal topic replays after its checkpoint, read from bookies piece by piece.

Many partitions are taken over at once and wait until their application is loaded, one after the other. If each held its whole
log meanwhile, they would hold gigabytes. So a waiting one holds its first piece only, which is all that most logs have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from stratalog_bookies.client import LedgerClient
from stratalog_broker.partitions.ledger_index import EntryRun
from stratalog_metadata.records import Ledger

FIRST_PIECE_BYTES: Final = 64 * 1024


class ReplayedBatches:
    """Iterates once over the batches of ``runs``, which are entries of sealed ledgers. Raises what reading raises."""

    def __init__(self, ledgers: LedgerClient, runs: Iterable[tuple[Ledger, EntryRun]], piece_bytes: int) -> None:
        self._ledgers = ledgers
        self._piece_bytes = piece_bytes
        self._runs = deque(runs)
        self._read: deque[memoryview] = deque()

    async def read_first(self) -> None:
        """Read the first piece, before iterating."""
        if self._runs:
            await self._read_next(min(FIRST_PIECE_BYTES, self._piece_bytes))

    def __aiter__(self) -> ReplayedBatches:
        return self

    async def __anext__(self) -> memoryview:
        if not self._read:
            if not self._runs:
                raise StopAsyncIteration
            await self._read_next(self._piece_bytes)
        return self._read.popleft()

    async def _read_next(self, bytes_max: int) -> None:
        ledger, run = self._runs[0]
        entries = await self._ledgers.read(ledger, run.first_entry, run.last_entry, bytes_max)
        self._read.extend(entry.payload for entry in entries)
        if entries[-1].entry_id == run.last_entry:
            self._runs.popleft()
        else:
            self._runs[0] = ledger, EntryRun(entries[-1].entry_id + 1, run.last_entry)
