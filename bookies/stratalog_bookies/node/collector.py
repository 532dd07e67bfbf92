"""Deletes ledgers that metadata no longer has: in each pass, and soon after a record was removed.

The list of held ledgers is taken first, the linearizable read of metadata second. A ledger's record exists before its first
entry, so a held ledger that is not found was deleted. DELETE follows the same rule: a ledger that metadata still has is kept. A
failed read, or metadata of another cluster, deletes nothing.

Metadata that was restored from an old copy has no record of ledgers that were made after the copy. The counter of ledger ids
proves it: ids below its ``lost_below`` may belong to such ledgers, and those without a record are kept, except ledgers that the
copy knew: their records went later. Until the counter has been raised above all ids that this bookie knows, nothing is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from typing import Final

from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.protocol.messages import LEDGERS_MAX, Status
from stratalog_core.errors import OutcomeUnknown, Retriable, StorageFailed
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import (
    CLUSTER_KEY,
    KNOWN_LEDGERS_KEY,
    LEDGER_IDS,
    Cluster,
    Counter,
    KnownLedgers,
    Ledger,
    counter_key,
    ledger_key,
)
from stratalog_metadata.state.changes import Change

_LEDGERS = "ledger/"
NOTHING: Final = 2**63
"""Above every ledger id."""
_GATHER_S = 0.1
"""Delay to gather deletions: the removal of a topic causes thousands."""
_log = logging.getLogger(__name__)


class Collector:
    """Garbage collection of one bookie. ``refusal`` says why ledgers without a record are kept; empty if none are.

    ``on_ids_lost`` is called when metadata has not allocated an id that this bookie knows.
    """

    def __init__(
        self, metadata: MetadataClient, disks: Sequence[Disk], cluster_id: str, on_ids_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._metadata = metadata
        self._disks = disks
        self._cluster_id = cluster_id
        self._on_ids_lost = on_ids_lost
        self.refusal = ""
        self._gone: dict[int, None] = {}
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Delete ledgers soon after their records were removed, until cancelled."""
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
        """Delete hinted ledgers after reading their records again. The view is only a hint; the next pass deletes the rest."""
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
            await self.delete(ledger_ids)
        except (Retriable, OutcomeUnknown) as failure:
            _log.info("deletion of ledgers is postponed to the next pass: %s", failure)

    async def collect(self) -> int:
        """One pass over all ledgers. Returns the number deleted. Does not raise if the quorum is unreachable."""
        held = [set(disk.core.contents.ledgers) for disk in self._disks]
        if not any(held):
            return 0
        try:
            records = [found.record for found in await self._metadata.scan(_LEDGERS)]
            known = {record.ledger_id for record in records if isinstance(record, Ledger)}
            unknown = [ids - known for ids in held]
            # Read last: if metadata was restored from an old copy during the scan, the counter says so.
            first = await self._first_deletable()
            lost = await self._lost(set().union(*unknown), first)
        except (Retriable, OutcomeUnknown) as failure:
            _log.info("the collection of deleted ledgers is postponed: %s", failure)
            return 0
        self._explain(len(lost), first)
        return len(await self._delete_all([ids - lost for ids in unknown]))

    async def _lost(self, ledger_ids: Set[int], first: int) -> set[int]:
        """Those of these ledgers without records that metadata may have lost, given the ``first`` deletable id."""
        suspects = {ledger_id for ledger_id in ledger_ids if ledger_id < first}
        if not suspects or first == NOTHING:
            return suspects
        (found,) = await self._metadata.read([KNOWN_LEDGERS_KEY])
        known = found.record.ledger_ids if found is not None and isinstance(found.record, KnownLedgers) else ()
        deleted = sorted(suspects.intersection(known))[:LEDGERS_MAX]
        # Read again: metadata may have been restored after the first time, and have the records since.
        records = await self._metadata.read([ledger_key(ledger_id) for ledger_id in deleted]) if deleted else []
        return suspects - {each for each, record in zip(deleted, records, strict=True) if record is None}

    async def delete(self, ledger_ids: Sequence[int]) -> bytearray:
        """Delete ledgers that a client reports as deleted. CONFLICT for those that exist, STORAGE_FAILED for those on a disk
        that cannot record it. Raises errors of metadata.
        """
        found = await self._metadata.read([ledger_key(ledger_id) for ledger_id in ledger_ids])
        gone = [ledger_id for ledger_id, record in zip(ledger_ids, found, strict=True) if record is None]
        first = await self._first_deletable() if gone else 0
        doomed = set(gone) - await self._lost(set(gone), first)
        deleted = await self._delete_all(
            [{ledger_id for ledger_id in doomed if self._disk_of(ledger_id) is disk} for disk in self._disks]
        )
        return bytearray(
            Status.OK if each in deleted else Status.STORAGE_FAILED if each in doomed else Status.CONFLICT
            for each in ledger_ids
        )

    async def _delete_all(self, of_disks: Sequence[set[int]]) -> set[int]:
        """Delete ledgers from all disks at once: one that hangs or is full does not keep the others' space. Returns the ids
        deleted.
        """
        deleting = [self._delete(disk, ids) for disk, ids in zip(self._disks, of_disks, strict=True)]
        return set().union(*await asyncio.gather(*deleting))

    async def _delete(self, disk: Disk, ledger_ids: set[int]) -> set[int]:
        """Delete ledgers from one disk. Returns ``ledger_ids``, or nothing if the disk cannot record it."""
        try:
            if ledger_ids:
                await disk.delete(sorted(ledger_ids))
        except StorageFailed as failure:
            _log.info("disk %d cannot delete %d ledgers now: %s", disk.position, len(ledger_ids), failure)
            return set()
        return ledger_ids

    def greatest_ledger_id(self) -> int:
        """Greatest id of a ledger that the disks have held or deleted; -1 if there was none."""
        return max((disk.core.contents.greatest_ledger_id for disk in self._disks), default=-1)

    async def _first_deletable(self) -> int:
        """Ledgers of this id and above are deleted if they have no record. ``NOTHING`` if metadata cannot be trusted."""
        greatest = self.greatest_ledger_id()  # Before the read: a later id may have been allocated after it.
        found = await self._metadata.read([CLUSTER_KEY, counter_key(LEDGER_IDS)])
        cluster, counter = (each.record if each is not None else None for each in found)
        if not isinstance(cluster, Cluster) or cluster.cluster_id != self._cluster_id:
            self._refuse(f"the metadata quorum belongs to another cluster than {self._cluster_id}")
            return NOTHING
        ids = counter if isinstance(counter, Counter) else Counter(name=LEDGER_IDS)
        if greatest >= ids.next_value:
            self._on_ids_lost()
            self._refuse(
                f"this bookie has held ledger {greatest}, but metadata has allocated only ids below {ids.next_value}:"
                " it was restored from an old copy"
            )
            return NOTHING
        return ids.lost_below

    def _explain(self, kept: int, first: int) -> None:
        if first == NOTHING:
            return
        if kept:
            self._refuse(
                f"{kept} ledgers with ids below {first} have no record and are kept: metadata was restored from an old copy"
                " and may have lost them"
            )
        else:
            self.refusal = ""

    def _refuse(self, reason: str) -> None:
        if reason != self.refusal:
            _log.error("no ledgers are deleted: %s", reason)
        self.refusal = reason
