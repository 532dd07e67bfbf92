"""Copies the entries of a share that a bookie lacks to it, at a bounded rate.

It first asks the bookie what it holds, so that an interrupted copy resumes and the check of a complete copy costs one small
request. Entries are read from any replica, their CRC checked, and added unchanged by recovery adds. When ``complete`` returns,
the whole share is durable on the bookie. Every failure raises. Refused entries count for the rate, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from stratalog_bookies.client.bookie_requests import BookieRequests
from stratalog_bookies.client.directory import BookieDirectory
from stratalog_bookies.client.ledger_reads import LedgerReads
from stratalog_bookies.metrics import Counters
from stratalog_bookies.protocol.messages import (
    ENTRY_HEADER,
    ENTRY_HEADER_BYTES,
    RECOVERY_ADD,
    EntryState,
    Range,
    ReadEntry,
    Status,
)
from stratalog_bookies.repair.core.shares import Share, runs
from stratalog_core.errors import Corrupt, NoSuchLedger, Overloaded, StorageFailed, StratalogError, Unavailable
from stratalog_metadata.records import Ledger

_CHUNK_BYTES: Final = 1024 * 1024
"""Payload of one read and one add; a larger entry is sent alone."""
_REFUSALS: Final[dict[int, type[StratalogError]]] = {
    Status.NO_SUCH_LEDGER: NoSuchLedger,
    Status.OVERLOADED: Overloaded,
    Status.CONFLICT: Corrupt,
    Status.BAD_CRC: Corrupt,
}


class Copier:
    """Copies for one auditor, one share at a time. ``on_refusal`` is called with a bookie that takes no entries of a ledger."""

    def __init__(
        self,
        requests: BookieRequests,
        reads: LedgerReads,
        directory: BookieDirectory,
        counters: Counters,
        bytes_per_s: int,
        on_refusal: Callable[[str, int], None],
    ) -> None:
        self._requests = requests
        self._reads = reads
        self._directory = directory
        self._counters = counters
        self._bytes_per_s = bytes_per_s
        self._on_refusal = on_refusal

    async def complete(self, ledger: Ledger, share: Share, bookie: str) -> int:
        """Complete a share on ``bookie``. Returns the number of entries copied.

        Raises ``Retriable``, ``OutcomeUnknown``, ``StorageFailed``, ``NoSuchLedger`` (deleted meanwhile), ``NoSuchEntry`` or
        ``Corrupt`` (entries are lost).
        """
        copied = 0
        for first, last in share.windows():
            missing = await self.missing(ledger.ledger_id, share, first, last, bookie)
            for run in runs(missing, share.ensemble_size):
                await self._copy(ledger, run, bookie)
            copied += len(missing)
        return copied

    async def missing(self, ledger_id: int, share: Share, first: int, last: int, bookie: str) -> list[int]:
        """Entries of the share from ``first`` to ``last`` that ``bookie`` does not hold."""
        held: set[int] = set()
        following = first
        while following <= last:
            (answer,) = await self._requests.held(bookie, Range(ledger_id, following, last))
            if answer.decided_to < following:
                raise Unavailable(f"{bookie} cannot list its entries of ledger {ledger_id}: {answer.status.name}")
            unreadable = [entry.entry_id for entry in answer.entries if entry.state != EntryState.PRESENT]
            if unreadable:
                raise StorageFailed(f"{bookie} cannot read entry {unreadable[0]} of ledger {ledger_id}", read_only=False)
            held.update(entry.entry_id for entry in answer.entries)
            following = answer.decided_to + 1
            await self._pace(len(answer.entries) * ENTRY_HEADER_BYTES)
        return [entry_id for entry_id in share.within(first, last) if entry_id not in held]

    async def _copy(self, ledger: Ledger, run: Sequence[int], bookie: str) -> None:
        wanted, following = set(run), run[0]
        while following <= run[-1]:
            found = await self._reads.stored(ledger, following, run[-1], _CHUNK_BYTES)
            following = found[-1].entry_id + 1
            await self._pace(sum([entry.payload_bytes for entry in found]))
            await self._add(ledger.ledger_id, [entry for entry in found if entry.entry_id in wanted], bookie)

    async def _add(self, ledger_id: int, entries: Sequence[ReadEntry], bookie: str) -> None:
        headers = [
            ENTRY_HEADER.pack(ledger_id, each.entry_id, each.lac, each.payload_bytes, each.crc, RECOVERY_ADD)
            for each in entries
        ]  # fmt: skip
        if not headers:
            return
        try:
            statuses = await self._requests.add(bookie, headers, [each.payload for each in entries])
        except StratalogError:
            self._directory.failed(bookie)
            raise
        if len(statuses) != len(entries):
            raise Corrupt(f"{bookie} answered {len(statuses)} statuses for {len(entries)} entries")
        self._check(ledger_id, statuses, bookie)
        self._counters.audit_copied_entries += len(entries)
        self._counters.audit_copied_bytes += sum([each.payload_bytes for each in entries])

    def _check(self, ledger_id: int, statuses: bytes, bookie: str) -> None:
        """Raise the error for the first refusal, if any."""
        refused = next((status for status in statuses if status != Status.OK), None)
        if refused is None:
            return
        kind = _REFUSALS.get(refused)
        reason = f"{bookie} refused an entry of ledger {ledger_id}: {Status(refused).name}"
        if kind is not None:
            raise kind(reason)
        self._directory.failed(bookie)
        self._on_refusal(bookie, ledger_id)
        raise StorageFailed(reason, read_only=refused == Status.READ_ONLY)

    async def _pace(self, moved_bytes: int) -> None:
        await asyncio.sleep(moved_bytes / self._bytes_per_s)
