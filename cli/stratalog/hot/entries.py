"""Reads a ledger's entries from its bookies, verifies every checksum, and describes each entry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from stratalog.hot.report import ledger_named
from stratalog_bookies.client import Entry, LedgerClient
from stratalog_core.batches.batch import check_batch
from stratalog_core.batches.checkpoint import MAGIC
from stratalog_core.errors import Invalid
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Ledger, LedgerState

_READ_BYTES: Final = 4 * 1024 * 1024
_FOLLOW_WAIT_S: Final = 5.0
_RECORD_PAUSE_S: Final = 0.2
"""Pause between two reads of the record of a ledger that is being recovered or sealed."""


async def entry_rows(ledgers: LedgerClient, ledger: Ledger, first: int, last: int | None) -> AsyncIterator[dict[str, Any]]:
    """Yield entries ``first`` to ``last`` (default: the last confirmed one).

    Raises ``Invalid`` for a range outside the ledger, ``NoSuchEntry``, ``Unavailable``, and ``Corrupt`` for a batch that does
    not match its producer's CRC.
    """
    end = await ledgers.read_lac(ledger)
    last = end if last is None else last
    if last > end or first < 0:
        raise Invalid(f"ledger {ledger.ledger_id} has entries 0 to {end}; requested: {first} to {last}")
    async for row in _rows(ledgers, ledger, first, last):
        yield row


async def follow_rows(view: MetadataView, ledgers: LedgerClient, ledger_id: int, first: int) -> AsyncIterator[dict[str, Any]]:
    """Yield entries from ``first`` on as they are confirmed, until the ledger is closed. Raises as ``entry_rows`` does."""
    reported_lac = -1
    while True:
        ledger = ledger_named(view, ledger_id)
        end = max(await ledgers.read_lac(ledger), reported_lac)
        async for row in _rows(ledgers, ledger, first, end):
            yield row
        first = max(first, end + 1)
        if ledger.state is LedgerState.CLOSED:
            return
        answer = await ledgers.await_lac(ledger, end, _FOLLOW_WAIT_S)
        reported_lac = answer.lac
        if answer.ended:
            await asyncio.sleep(_RECORD_PAUSE_S)


async def _rows(ledgers: LedgerClient, ledger: Ledger, first: int, last: int) -> AsyncIterator[dict[str, Any]]:
    while first <= last:
        for entry in await ledgers.read(ledger, first, last, _READ_BYTES):
            yield entry_row(entry)
            first = entry.entry_id + 1


def entry_row(entry: Entry) -> dict[str, Any]:
    """Return a row with the batch's header, or with kind "checkpoint". Raises ``Corrupt``."""
    row: dict[str, Any] = {"entry": entry.entry_id, "bytes": len(entry.payload)}
    if bytes(entry.payload[: len(MAGIC)]) == MAGIC:
        return {**row, "kind": "checkpoint"}
    header = check_batch(entry.payload)
    return {
        **row,
        "kind": "control" if header.is_control else "batch",
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "max_timestamp_ms": header.max_timestamp_ms,
        "producer_id": header.producer_id,
        "base_sequence": header.base_sequence,
    }
