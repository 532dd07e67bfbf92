"""Cache of the indexes of sealed hot ledgers, built from batch headers when a reader first needs them. Bounded in bytes.

Takeovers build indexes too. The headers of both are read in runs, of which a fixed number is in memory at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from stratalog_bookies.client import EntryHead, LedgerClient
from stratalog_broker.partitions.batched_semaphore import BatchedSemaphore
from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_core.batches.batch import HEADER_BYTES, BatchHeader, read_header
from stratalog_core.batches.checkpoint import is_checkpoint
from stratalog_core.errors import Corrupt
from stratalog_core.single_flight import SingleFlight
from stratalog_metadata.records import Ledger

RUN_HEADS: Final = 1024
"""Headers in one run, about 300 KB as objects."""
RUNS_AT_ONCE: Final = 32
"""Runs in memory at once, however many ledgers are read: 10 MB."""


class HeadRuns:
    """Reads the entry headers of ledgers in runs. One instance per broker."""

    def __init__(self, ledgers: LedgerClient) -> None:
        self._ledgers = ledgers
        self._slots = BatchedSemaphore(RUNS_AT_ONCE)

    @asynccontextmanager
    async def read(self, ledger: Ledger, first: int) -> AsyncIterator[list[EntryHead]]:
        """Read up to ``RUN_HEADS`` headers from entry ``first`` on. Keep none after the block."""
        async with self._slots:
            yield await self._ledgers.read_headers(ledger, first, min(first + RUN_HEADS - 1, ledger.last_entry))


class IndexCache:
    """One instance per broker. Concurrent requests for the same index share one build."""

    def __init__(self, ledgers: LedgerClient, bytes_max: int) -> None:
        self.heads = HeadRuns(ledgers)
        self._bytes_max = bytes_max
        self.bytes_held = 0
        self._indexes: OrderedDict[int, LedgerIndex] = OrderedDict()
        self._building: SingleFlight[int, LedgerIndex] = SingleFlight()

    def put(self, ledger_id: int, index: LedgerIndex) -> None:
        """Add the index of a sealed ledger."""
        self.drop(ledger_id)
        self._indexes[ledger_id] = index
        self.bytes_held += index.memory_bytes
        self.resize(self._bytes_max)

    def resize(self, bytes_max: int) -> None:
        """Change the bound and evict accordingly; the most recently used index always stays."""
        self._bytes_max = bytes_max
        while self.bytes_held > bytes_max and len(self._indexes) > 1:
            _, oldest = self._indexes.popitem(last=False)
            self.bytes_held -= oldest.memory_bytes

    def drop(self, ledger_id: int) -> None:
        """Drop the index of a deleted ledger."""
        index = self._indexes.pop(ledger_id, None)
        if index is not None:
            self.bytes_held -= index.memory_bytes

    async def get(self, ledger: Ledger) -> LedgerIndex:
        """Return the index of a CLOSED ledger. Raises what reading its headers raises."""
        index = self._indexes.get(ledger.ledger_id)
        if index is not None:
            self._indexes.move_to_end(ledger.ledger_id)
            return index
        # The build continues if its readers give up: a large ledger's index can take longer than the timeout of one read.
        return await self._building.get(ledger.ledger_id, lambda: self._build(ledger), keep=True)

    async def _build(self, ledger: Ledger) -> LedgerIndex:
        index = LedgerIndex(ledger.base_offset)
        for first in range(0, ledger.last_entry + 1, RUN_HEADS):
            async with self.heads.read(ledger, first) as heads:
                for entry in heads:
                    index_batch(index, entry.entry_id, entry.head)
        check_end(index, ledger)
        self.put(ledger.ledger_id, index)
        return index

    async def close(self) -> None:
        """Cancel all builds."""
        await self._building.close()


def index_batch(index: LedgerIndex, entry_id: int, head: bytes | memoryview) -> BatchHeader | None:
    """Add an entry, given its first bytes, and return its header; None for a checkpoint part. Raises ``Corrupt`` at a gap."""
    if is_checkpoint(head):
        return None
    if len(head) < HEADER_BYTES:
        raise Corrupt(f"entry {entry_id} is too short for a record batch: {len(head)} bytes")
    header = read_header(head)
    if header.base_offset != index.end_offset:
        raise Corrupt(f"entry {entry_id} begins at offset {header.base_offset}; expected {index.end_offset}")
    index.append(entry_id, header.base_offset, header.next_offset, header.max_timestamp_ms, header.size_bytes)
    return header


def check_end(index: LedgerIndex, ledger: Ledger) -> None:
    """Raise ``Corrupt`` unless the index of a CLOSED ledger ends where its record says.

    Headers are read without a checksum: a corrupt one shows as a gap at the next batch, a corrupt last one only here.
    """
    if index.end_offset != ledger.end_offset:
        raise Corrupt(
            f"the batch headers of ledger {ledger.ledger_id} end at offset {index.end_offset}, its record says"
            f" {ledger.end_offset}: a bookie's copy is corrupt"
        )
