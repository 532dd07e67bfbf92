"""Scenario: long outages of bookies and of the store, one after the other and together.

The cluster of ``log`` with two copies of each record, hot copies that stay for some seconds after they are cold, and brokers
that have just restarted, so that no record is in their memory. They compress what producers send. First both bookies of a
ledger that is also cold are lost: its records must still be readable. Then the store is away, too, or carries out no write, for
as long as a few ledgers take to fill: producers continue, and nothing is removed; a store that answers reads still serves the
ledger. When the store is back the records are readable again, with the bookies still lost.
"""

from __future__ import annotations

import asyncio
from typing import Final

from simulation.checkers.coverage import READ_WITHOUT_WRITES
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.scenarios import log
from simulation.scenarios.cluster import LOOK_S, bootstrap
from simulation.scenarios.log import TOPIC, Reader
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import StoreFaults, WriteFault
from stratalog_metadata.records import (
    Ledger,
    LedgerState,
    ManifestPointer,
    Partition,
    Topic,
    manifest_pointer_key,
    partition_key,
)

COPIES: Final = 2
LOCAL_RETENTION_MS: Final = 12_000
WARM_UP_S: Final = 5
TAKEOVER_S: Final = 3
STORE_AWAY_S: Final = 5
FOUND_S: Final = 10.0
READABLE_S: Final = 12.0
"""A read that gets no answer from bookies turns to the store after two seconds; the rest is for other faults of a run."""


class Scenario(log.Scenario):
    """One run."""

    replication_factor = COPIES
    operators = 0
    """No operator raises the replication factor while half of the bookies are lost."""

    def configs(self) -> dict[str, str]:
        """Producers send uncompressed batches, so brokers compress each of them."""
        return {**super().configs(), "local.retention.ms": str(LOCAL_RETENTION_MS), "compression.type": "lz4"}

    def _make_readers(self, world: World) -> list[Reader]:
        """Return no readers: records that several readers request stay in the brokers' memory."""
        return []

    async def _faults(self) -> None:
        await self._pass(WARM_UP_S)
        for broker in self.brokers:
            broker.crash()
        await asyncio.sleep(0.3)
        for broker in self.brokers:
            broker.boot()
        await self._pass(TAKEOVER_S)
        ledger = await self._offloaded_ledger()
        lost = [machine for machine in self.bookies if machine.name in ledger.fragments[0].bookies]
        if self.world.decides("bookies"):
            self.world.note(f"ledger {ledger.ledger_id} is offloaded, and its bookies {[each.name for each in lost]} are lost")
            for machine in lost:
                machine.crash()
        await self._require_readable(ledger)
        if self.world.decides("store"):
            await self._store_away(ledger)
        await self._require_readable(ledger)
        for machine in self.servers:
            machine.boot()

    async def _store_away(self, ledger: Ledger) -> None:
        acknowledged = len(self.truth.acknowledged)
        chance = self.world.random("outages")
        stalls, fault = chance.random() < 0.5, chance.choice([None, None, None, *WriteFault])
        if fault is not None:
            self.world.note(f"the store {fault.value}")
            self.bucket.faults = StoreFaults(writes=fault)
        else:
            self.world.note(f"the store {'does not answer' if stalls else 'is away'}")
            self.bucket.faults = StoreFaults(unavailable=1.0, stalled=stalls)
        await self._pass(STORE_AWAY_S)
        self.audit.require(len(self.truth.acknowledged) > acknowledged, "nothing was acknowledged while the store was away")
        if fault is not None:
            await self._require_readable(ledger)
            self.world.coverage.meet(READ_WITHOUT_WRITES)
        self.bucket.faults = StoreFaults()

    async def _offloaded_ledger(self) -> Ledger:
        """Return the newest ledger of an earlier owner that is on two bookies and in the store, but in no broker's memory."""
        for _ in range(int(FOUND_S / LOOK_S)):
            found = [
                record for record in self.audit.records.values() if isinstance(record, Ledger) and self._is_in_both(record)
            ]
            if found:
                return max(found, key=lambda ledger: (ledger.closed_at_ms, ledger.ledger_id))
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"no ledger was offloaded in {FOUND_S:g} s")

    def _is_in_both(self, ledger: Ledger) -> bool:
        topics = {r.topic_id for r in self.audit.records.values() if isinstance(r, Topic) and r.name == TOPIC}
        pointer = self.audit.records.get(manifest_pointer_key(ledger.topic_id, ledger.partition))
        is_cold = isinstance(pointer, ManifestPointer) and ledger.base_offset < ledger.end_offset <= pointer.end_offset
        is_whole = ledger.state is LedgerState.CLOSED and len(ledger.fragments) == 1
        partition = self.audit.records.get(partition_key(ledger.topic_id, ledger.partition))
        is_earlier = isinstance(partition, Partition) and ledger.leader_epoch < partition.leader_epoch
        return ledger.topic_id in topics and is_cold and is_whole and is_earlier

    async def _require_readable(self, ledger: Ledger) -> None:
        """Check that every record of the ledger can be read now, from any tier."""

        async def read(machine: Machine, ports: Ports) -> None:
            client = KafkaClient(self.world, ports, machine.name, bootstrap())
            offset = ledger.base_offset
            async with asyncio.timeout(READABLE_S):
                while offset < ledger.end_offset:
                    try:
                        error, _, records = await client.fetch(TOPIC, ledger.partition, offset)
                    except NotServed:
                        error, records = -1, []
                    if error != NONE:
                        client.forget(TOPIC, ledger.partition)
                        await asyncio.sleep(0.1)
                    for record in records:
                        self.truth.see(ledger.partition, record)
                    offset = max([offset, *(record.offset + 1 for record in records)])

        reader = Machine(self.world, "outage-reader-0", read)
        reader.boot()
        await reader.ended.wait()
        what = f"ledger {ledger.ledger_id} ({TOPIC}-{ledger.partition} from offset {ledger.base_offset})"
        if reader.failure is not None:
            raise AssertionError(f"{what} cannot be read in {READABLE_S:g} s: {reader.failure!r}") from reader.failure
