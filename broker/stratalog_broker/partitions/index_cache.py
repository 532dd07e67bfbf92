"""Cache of the indexes of sealed hot ledgers, built from batch headers when a reader first needs them. Bounded in bytes.

Takeovers build indexes too. The headers of both are read in runs, of which a fixed number is in memory at once. An index
also says which transactions were aborted in its ledger or open at its end. That takes a replay from the ledger's checkpoint,
which is left out if the ledger has no batch of a transaction and its owner has recorded that none was open at its end.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from stratalog_bookies.client import EntryHead, LedgerClient
from stratalog_broker.partitions.batched_semaphore import BatchedSemaphore
from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_core.batches.batch import HEADER_BYTES, TRANSACTIONAL_BIT, BatchHeader, is_control, is_transactional, read_header
from stratalog_core.batches.checkpoint import Checkpoint, decode_checkpoint, is_checkpoint, part_position
from stratalog_core.errors import Corrupt
from stratalog_core.partition_state.replay_state import ABORTED_MAX
from stratalog_core.partition_state.transactions import Transactions
from stratalog_core.single_flight import SingleFlight
from stratalog_metadata.records import NONE_UNDECIDED, Ledger

RUN_HEADS: Final = 1024
"""Headers in one run, about 300 KB as objects."""
RUNS_AT_ONCE: Final = 32
"""Runs in memory at once, however many ledgers are read: 10 MB."""


class HeadRuns:
    """Reads the entry headers of ledgers in runs, and what a replay of them needs. One instance per broker."""

    def __init__(self, ledgers: LedgerClient) -> None:
        self._ledgers = ledgers
        self._slots = BatchedSemaphore(RUNS_AT_ONCE)

    @asynccontextmanager
    async def read(self, ledger: Ledger, first: int) -> AsyncIterator[list[EntryHead]]:
        """Read up to ``RUN_HEADS`` headers from entry ``first`` on. Keep none after the block."""
        async with self._slots:
            yield await self._ledgers.read_headers(ledger, first, min(first + RUN_HEADS - 1, ledger.last_entry))

    async def control_batches(self, ledger: Ledger, heads: Sequence[EntryHead]) -> dict[int, memoryview]:
        """Read the control batches among ``heads`` whole, because a marker's type is in its record; by entry id."""
        entry_ids = [head.entry_id for head in heads if is_control(head.head) and not is_checkpoint(head.head)]
        read = self._ledgers.read_together
        found = await asyncio.gather(*(read(ledger, entry_id, entry_id) for entry_id in entry_ids))
        return {entry.entry_id: entry.payload for (entry,) in found}

    async def checkpoint(
        self, ledger: Ledger, heads: Sequence[EntryHead], payloads: Sequence[memoryview] = ()
    ) -> Checkpoint | None:
        """Return the ledger's checkpoint; None if its writer died before writing all parts.

        ``heads`` are the ledger's first headers, ``payloads`` its first entries as far as they are in memory.
        """
        if not heads or not is_checkpoint(heads[0].head):
            return None
        _, parts = part_position(heads[0].head)
        if parts > ledger.last_entry + 1:
            return None
        found = list(payloads[:parts])
        while len(found) < parts:
            entries = await self._ledgers.read_together(ledger, len(found), parts - 1)
            found += [entry.payload for entry in entries]
        return decode_checkpoint(found)


class IndexCache:
    """One instance per broker. Concurrent requests for the same index share one build."""

    def __init__(self, ledgers: LedgerClient, bytes_max: int) -> None:
        self._ledgers = ledgers
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

    def cached(self, ledger_id: int) -> LedgerIndex | None:
        """Return the index if it is in memory."""
        index = self._indexes.get(ledger_id)
        if index is not None:
            self._indexes.move_to_end(ledger_id)
        return index

    async def get(self, ledger: Ledger) -> LedgerIndex:
        """Return the index of a CLOSED ledger. Raises what reading its headers raises."""
        index = self.cached(ledger.ledger_id)
        if index is not None:
            return index
        # The build continues if its readers give up: a large ledger's index can take longer than the timeout of one read.
        return await self._building.get(ledger.ledger_id, lambda: self._build(ledger), keep=True)

    async def _build(self, ledger: Ledger) -> LedgerIndex:
        index = LedgerIndex(ledger.base_offset)
        transactions: Transactions | None = None
        for first in range(0, ledger.last_entry + 1, RUN_HEADS):
            async with self.heads.read(ledger, first) as heads:
                if transactions is None and (ledger.undecided_from != NONE_UNDECIDED or any(map(_is_transactional, heads))):
                    transactions = await self._open_at_start(ledger)
                control_batches = {} if transactions is None else await self.heads.control_batches(ledger, heads)
                for entry in heads:
                    header = index_batch(index, entry.entry_id, entry.head)
                    if transactions is not None and header is not None and header.attributes & TRANSACTIONAL_BIT:
                        batch = control_batches.get(entry.entry_id, entry.head)
                        transactions.replay(header, header.base_offset, batch)
        check_end(index, ledger)
        if transactions is not None:
            index.transactions = transactions.since(ledger.base_offset)
        self.put(ledger.ledger_id, index)
        return index

    async def _open_at_start(self, ledger: Ledger) -> Transactions:
        """Return the transactions that are open where the ledger begins, from its checkpoint."""
        checkpoint = await self.heads.checkpoint(ledger, await self._ledgers.read_headers(ledger, 0, 0))
        transactions = Transactions(ABORTED_MAX)
        transactions.load(checkpoint.transactions if checkpoint is not None else (), ledger.base_offset)
        return transactions

    async def close(self) -> None:
        """Cancel all builds."""
        await self._building.close()


def _is_transactional(entry: EntryHead) -> bool:
    return is_transactional(entry.head) and not is_checkpoint(entry.head)


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
