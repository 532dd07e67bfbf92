"""Invariants at the end of the ``log`` scenario, when all faults are over: bucket, bookies and metadata agree.

A check returns the problem or an empty string; a condition that only has to hold eventually is retried for ``EVENTUALLY_S``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Final

from simulation.checkers.audit import Audit
from simulation.world.machine import Machine, Ports
from simulation.world.object_store import Bucket, SimulatedStore
from stratalog_bookies.protocol import messages
from stratalog_core.errors import StratalogError
from stratalog_metadata.records import Ledger, Log, ManifestPointer, Topic
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import require_sound
from stratalog_tiering.format.object_keys import parse_segment_key

EVENTUALLY_S: Final = 45.0
LOOK_S: Final = 0.25
LEDGERS_PER_PARTITION_MAX: Final = 4
INTERNAL_LEDGERS_MAX: Final = 3
"""Per partition of an internal topic: the newest, and two before it. An owner drops the earlier ones once the checkpoint of its
own is durable; two owners in a row may die before that, and the next one drops them only when it has something to write."""
RECORDS_FIXED_MAX: Final = 60
RECORDS_PER_PARTITION_MAX: Final = 5 + LEDGERS_PER_PARTITION_MAX

Check = Callable[[], Awaitable[str]]


class FinalChecks:
    """The checks at the end of a run. ``run`` raises ``AssertionError``.

    ``bookies`` are addresses; they keep the ``lost`` ledgers.
    """

    def __init__(
        self, audit: Audit, bucket: Bucket, bookies: Sequence[str], partitions: int, lost: Set[int] = frozenset()
    ) -> None:
        self._audit = audit
        self._bucket = bucket
        self._bookies = bookies
        self._partitions = partitions
        self._lost = lost

    async def run(self, machine: Machine, ports: Ports) -> None:
        for check in (self._metadata_is_small, self._no_orphans, lambda: self._no_dead_ledgers(ports)):
            await _eventually(check)
        await self._bucket_is_sound(ports)

    async def _metadata_is_small(self) -> str:
        records = self._audit.records.values()
        ledgers = sum(isinstance(record, Ledger) for record in records)
        ledgers_max = self._partitions * LEDGERS_PER_PARTITION_MAX
        records_max = RECORDS_FIXED_MAX + self._partitions * RECORDS_PER_PARTITION_MAX
        internal = {record.topic_id for record in records if isinstance(record, Topic) and record.internal}
        for log in [record for record in records if isinstance(record, Log) and record.topic_id in internal]:
            if len(log.ledgers) > INTERNAL_LEDGERS_MAX:
                return f"{log.key()} holds {len(log.ledgers)} ledgers; bounded are {INTERNAL_LEDGERS_MAX}"
        if ledgers > ledgers_max:
            return f"metadata holds {ledgers} ledgers; bounded are {ledgers_max}"
        return f"metadata holds {len(records)} records; bounded are {records_max}" if len(records) > records_max else ""

    async def _no_orphans(self) -> str:
        segments = {key for key in self._bucket.objects if parse_segment_key(key) is not None}
        orphans = sorted(segments - self._audit.referenced)
        return f"{len(orphans)} segments are in the bucket that nothing refers to: {orphans[0]}" if orphans else ""

    async def _no_dead_ledgers(self, ports: Ports) -> str:
        for address in self._bookies:
            body = messages.encode(messages.ListLedgers(after=-1, limit=10_000))
            try:
                answer = await ports.transport.channel(address).call(messages.LIST, (body,), 1.0)
            except StratalogError as failure:
                return f"{address} does not list its ledgers: {failure}"
            held = {each.ledger_id for each in messages.decode(messages.LedgerPage, answer).ledgers} - self._lost
            known = {record.ledger_id for record in self._audit.records.values() if isinstance(record, Ledger)}
            if held - known:
                return f"{address} still holds ledger {min(held - known)}, which metadata does not have"
        return ""

    async def _bucket_is_sound(self, ports: Ports) -> None:
        """Verify every byte that the committed manifests refer to."""
        store = SimulatedStore(self._bucket, ports.loop, ports.random)
        source = ManifestSource(store)
        for pointer in [record for record in self._audit.records.values() if isinstance(record, ManifestPointer)]:
            manifest = await source.manifest(pointer)
            async for entry in source.segments(manifest):
                await require_sound(store, source, entry, ports.background, reads_at_once=4)


async def _eventually(check: Check) -> None:
    for _ in range(int(EVENTUALLY_S / LOOK_S)):
        wrong = await check()
        if not wrong:
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError(f"{wrong} ({EVENTUALLY_S:g} s after everything was well)")
