"""Deletes ledgers that metadata no longer has, and only those: at each pass, and soon after a record was seen to go.

The listing of what the disks hold is taken first, the linearizable scan of metadata second. A ledger's record exists before
its first entry, so one that is held and not found was deleted. The same rule guards DELETE: a ledger that metadata still
has is kept, whoever asks. Answers that fail or belong to another cluster delete nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.protocol.messages import LEDGERS_MAX, Status
from stratalog_core.errors import OutcomeUnknown, Retriable, StorageFailed
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import CLUSTER_KEY, LEDGER_IDS, Cluster, Counter, Ledger, counter_key, ledger_key
from stratalog_metadata.state.changes import Change

_LEDGERS = "ledger/"
_GATHER_S = 0.1
"""Deletions come by the thousand when a topic goes: they are gathered for so long."""
_log = logging.getLogger(__name__)


class Collector:
    """Garbage collection of one bookie. ``refusal`` says why nothing at all is deleted, if metadata is not to be believed."""

    def __init__(self, metadata: MetadataClient, disks: Sequence[Disk], cluster_id: str) -> None:
        self._metadata = metadata
        self._disks = disks
        self._cluster_id = cluster_id
        self.refusal = ""
        self._gone: dict[int, None] = {}
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Delete ledgers soon after their records have gone, until cancelled: no need to wait for the next pass."""
        unsubscribe = self._metadata.view.subscribe(self._on_changes)
        try:
            while True:
                await self._wanted.wait()
                await asyncio.sleep(_GATHER_S)
                self._wanted.clear()
                gone, self._gone = self._gone, {}
                await self._collect_now(list(gone))
        finally:
            unsubscribe()

    def _on_changes(self, changes: Sequence[Change]) -> None:
        """The view only hints: what is gone is read again before anything is deleted. The rest is left to the next pass."""
        for change in changes:
            if change.after is None and change.key.startswith(_LEDGERS) and len(self._gone) < LEDGERS_MAX:
                ledger_id = int(change.key.removeprefix(_LEDGERS), 16)
                if self._disk_of(ledger_id).core.contents.ledgers.get(ledger_id) is not None:
                    self._gone[ledger_id] = None
                    self._wanted.set()

    def _disk_of(self, ledger_id: int) -> Disk:
        return self._disks[ledger_id % len(self._disks)]

    async def _collect_now(self, ledger_ids: Sequence[int]) -> None:
        try:
            await self.delete(ledger_ids, self._disk_of)
        except (Retriable, OutcomeUnknown, StorageFailed) as failure:
            _log.info("deleted ledgers are left to the next pass: %s", failure)

    async def collect(self) -> int:
        """One pass over all ledgers; returns how many were deleted. Never raises for a quorum that is away."""
        held = [set(disk.core.contents.ledgers) for disk in self._disks]
        if not any(held):
            return 0
        try:
            if not await self._is_to_be_believed():
                return 0
            records = [found.record for found in await self._metadata.scan(_LEDGERS)]
            known = {record.ledger_id for record in records if isinstance(record, Ledger)}
            return sum([await self._delete(disk, ids - known) for disk, ids in zip(self._disks, held, strict=True)])
        except (Retriable, OutcomeUnknown, StorageFailed) as failure:
            _log.info("nothing is collected now: %s", failure)
            return 0

    async def delete(self, ledger_ids: Sequence[int], disk_of: Callable[[int], Disk]) -> bytearray:
        """Delete ledgers that a client says are gone. CONFLICT for those that are not. Raises what metadata or the disk
        raises.
        """
        found = await self._metadata.read([ledger_key(ledger_id) for ledger_id in ledger_ids])
        gone = [ledger_id for ledger_id, record in zip(ledger_ids, found, strict=True) if record is None]
        if gone and not await self._is_to_be_believed():
            gone = []
        for disk in self._disks:
            await self._delete(disk, {ledger_id for ledger_id in gone if disk_of(ledger_id) is disk})
        deleted = set(gone)
        return bytearray(Status.OK if ledger_id in deleted else Status.CONFLICT for ledger_id in ledger_ids)

    async def _delete(self, disk: Disk, ledger_ids: set[int]) -> int:
        if ledger_ids and not disk.core.failure:
            await disk.delete(sorted(ledger_ids))
        return len(ledger_ids)

    async def _is_to_be_believed(self) -> bool:
        """Whether it is this cluster's metadata, and has handed out the id of every ledger that is held."""
        self.refusal = await self._disbelief()
        if self.refusal:
            _log.error("nothing is deleted: %s", self.refusal)
        return not self.refusal

    async def _disbelief(self) -> str:
        greatest = max((ledger_id for disk in self._disks for ledger_id in disk.core.contents.ledgers), default=-1)
        found = await self._metadata.read([CLUSTER_KEY, counter_key(LEDGER_IDS)])
        cluster, counter = (each.record if each is not None else None for each in found)
        if not isinstance(cluster, Cluster) or cluster.cluster_id != self._cluster_id:
            return f"the metadata quorum is not of cluster {self._cluster_id}"
        next_id = counter.next_value if isinstance(counter, Counter) else 0
        if greatest >= next_id:
            return f"ledger {greatest} is held, and metadata has handed out ids below {next_id} only: it has lost its memory"
        return ""
