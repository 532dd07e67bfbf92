"""Repairs corrupt entries on a bookie's disk with the copies of other replicas.

A corrupt entry is read from another bookie, its CRC checked, compared with this bookie's index, and written again to the log.
The new copy replaces the corrupt one as soon as it is durable. It is the entry that this bookie acknowledged, so neither fences
nor the state of the ledger matter. An entry without a good copy stays unreadable, is reported, and is retried; it never becomes
absent.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from stratalog_bookies.client.ledger_reads import LedgerReads
from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.disk.core.corruption import CorruptEntry
from stratalog_bookies.disk.core.disk_core import same_payload
from stratalog_bookies.disk.core.index import Row
from stratalog_bookies.disk.core.lookup import Place
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.protocol.messages import ReadEntry
from stratalog_core.errors import Corrupt, StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Ledger, ledger_key

_log = logging.getLogger(__name__)
_RETRY_S: Final = 1.0


class EntryRepair:
    """Repairs one disk, one entry at a time. Each disk has its own, so that one that hangs does not delay the others."""

    def __init__(self, metadata: MetadataClient, reads: LedgerReads, clock: Clock, disk: Disk, compaction: Compaction) -> None:
        self._metadata = metadata
        self._reads = reads
        self._clock = clock
        self._disk = disk
        self._compaction = compaction
        self._wanted = asyncio.Event()

    def wake(self) -> None:
        """Start a repair: corruption was found."""
        self._wanted.set()

    async def run(self) -> None:
        """Repair, and retry what could not be repaired, until cancelled."""
        while True:
            await self._wait()
            try:
                await self._repair_disk()
            except (StratalogError, OSError) as failure:
                _log.warning("the repair of disk %d is postponed: %s", self._disk.position, failure)
            except Exception:
                _log.exception("the repair of disk %d failed unexpectedly and is retried", self._disk.position)

    async def _wait(self) -> None:
        pending = len(self._disk.corruption) or self._disk.corruption.files
        try:
            async with asyncio.timeout(_RETRY_S if pending else None):
                await self._wanted.wait()
        except TimeoutError:
            return
        self._wanted.clear()

    async def _repair_disk(self) -> None:
        disk = self._disk
        for corrupt in disk.corruption.due(self._clock.monotonic()):
            if disk.core.failure:
                return
            await self._repair_safely(disk, corrupt)
        await self._compaction.empty_corrupt_files()

    async def _repair_safely(self, disk: Disk, corrupt: CorruptEntry) -> None:
        try:
            if await self._repair(disk, corrupt):
                disk.corruption.repaired += 1
                disk.counters.repaired_entries += 1
                _log.warning(
                    "entry %d of ledger %d was corrupt and is repaired", corrupt.entry_id, corrupt.ledger_id
                )  # fmt: skip
        except (StratalogError, OSError) as failure:
            first = not corrupt.reason
            corrupt.postpone(self._clock.monotonic(), str(failure))
            level = logging.ERROR if first else logging.DEBUG
            _log.log(
                level, "entry %d of ledger %d is corrupt and no good copy was found: %s",
                corrupt.entry_id, corrupt.ledger_id, failure,
            )  # fmt: skip
        else:
            disk.corruption.remove(corrupt)
            disk.allow_compaction(corrupt.generation)

    async def _repair(self, disk: Disk, corrupt: CorruptEntry) -> bool:
        """Write a good copy. Returns False if none is needed. Raises if none is available now."""
        place = await disk.reads.corrupt(corrupt.ledger_id, corrupt.entry_id)
        if place is None:
            return False
        ledger = await self._ledger(corrupt.ledger_id)
        if ledger is None:
            return False
        found = (await self._reads.stored(ledger, corrupt.entry_id, corrupt.entry_id, 1))[0]
        _check_same(place, found)
        await disk.write_again(corrupt.ledger_id, _row_of(found), bytes(found.payload), place.generation)
        return True

    async def _ledger(self, ledger_id: int) -> Ledger | None:
        """The ledger's record; None if the ledger was deleted: the collector then removes the entries."""
        (found,) = await self._metadata.read([ledger_key(ledger_id)])
        return found.record if found is not None and isinstance(found.record, Ledger) else None


def _row_of(found: ReadEntry) -> Row:
    return Row(found.entry_id, 0, found.payload_bytes, found.crc, found.lac, 0)


def _check_same(place: Place, found: ReadEntry) -> None:
    """Raise ``Corrupt`` if the replica's entry differs from the one that this bookie acknowledged."""
    header = (place.ledger_id, found.entry_id, found.lac, found.payload_bytes, found.crc, 0)
    if not same_payload(header, place.row):
        raise Corrupt(
            f"a replica's entry {found.entry_id} of ledger {place.ledger_id} differs from the one that this bookie acknowledged"
        )
