"""An index that is built from batch headers, which have no checksum, is right or is refused."""

from __future__ import annotations

import asyncio
from typing import cast
from uuid import UUID

import msgspec
import pytest

from stratalog_bookies.client import EntryHead, LedgerClient
from stratalog_broker.partitions.index_cache import RUN_HEADS, RUNS_AT_ONCE, IndexCache
from stratalog_core.batches.batch import HEADER_BYTES
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt
from stratalog_metadata.records import Fragment, Ledger, LedgerState

BASE_OFFSET = 100
LEDGER = Ledger(
    ledger_id=7, topic_id=UUID(int=1), partition=0, base_offset=BASE_OFFSET, leader_epoch=1, write_quorum=1, ack_quorum=1,
    fragments=(Fragment(first_entry=0, bookies=("b0",)),), state=LedgerState.CLOSED, last_entry=2, end_offset=BASE_OFFSET + 6,
)  # fmt: skip


class Heads:
    """A ledger of three batches of two records; ``rotten`` has a byte of one of their heads changed."""

    def __init__(self, rotten: tuple[int, int] | None) -> None:
        self._rotten = rotten

    async def read_headers(self, ledger: Ledger, first: int, last: int) -> list[EntryHead]:
        return [self._head(entry_id) for entry_id in range(first, last + 1)]

    def _head(self, entry_id: int) -> EntryHead:
        first = BASE_OFFSET + 2 * entry_id
        batch = build_batch([Record(offset=first + n, timestamp_ms=1, key=None, value=b"v") for n in range(2)])
        head = bytearray(batch[:HEADER_BYTES])
        if self._rotten is not None and self._rotten[0] == entry_id:
            head[self._rotten[1]] ^= 8
        return EntryHead(entry_id, len(batch), bytes(head))


def index_cache(rotten: tuple[int, int] | None = None) -> IndexCache:
    return IndexCache(cast(LedgerClient, Heads(rotten)), 1 << 20)


async def test_an_index_of_sound_heads() -> None:
    index = await index_cache().get(LEDGER)
    assert (len(index), index.end_offset) == (3, LEDGER.end_offset)


BASE_OFFSET_BYTE, LAST_OFFSET_DELTA_BYTE = 7, 26


@pytest.mark.parametrize("entry_id", range(3))
@pytest.mark.parametrize("byte", [BASE_OFFSET_BYTE, LAST_OFFSET_DELTA_BYTE])
async def test_rot_in_a_head_is_refused(entry_id: int, byte: int) -> None:
    with pytest.raises(Corrupt):
        await index_cache((entry_id, byte)).get(LEDGER)


class LargeLedgers:
    """Ledgers of single-record batches, and the most headers that their readers held at once."""

    def __init__(self) -> None:
        self._held = 0
        self.most_held = 0

    async def read_headers(self, ledger: Ledger, first: int, last: int) -> list[EntryHead]:
        self._held += last - first + 1
        self.most_held = max(self.most_held, self._held)
        heads = []
        for entry_id in range(first, last + 1):
            batch = build_batch([Record(offset=entry_id, timestamp_ms=1, key=None, value=b"v")])
            heads.append(EntryHead(entry_id, len(batch), bytes(batch[:HEADER_BYTES])))
        await asyncio.sleep(0)
        self._held -= last - first + 1
        return heads


async def test_headers_in_memory_are_bounded_however_many_indexes_are_built() -> None:
    ledgers, entries = LargeLedgers(), RUN_HEADS + 10
    cache = IndexCache(cast(LedgerClient, ledgers), 1 << 20)
    wanted = [
        msgspec.structs.replace(LEDGER, ledger_id=number, base_offset=0, last_entry=entries - 1, end_offset=entries)
        for number in range(2 * RUNS_AT_ONCE)
    ]
    indexes = await asyncio.gather(*map(cache.get, wanted))
    assert {(len(index), index.end_offset) for index in indexes} == {(entries, entries)}
    assert ledgers.most_held == RUN_HEADS * RUNS_AT_ONCE
