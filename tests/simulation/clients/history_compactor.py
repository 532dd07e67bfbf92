"""``stratalog job compact`` as a process: finds superseded records by a dictionary instead of Spark, and removes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

from support.superseded import offset_set, superseded_offsets

from simulation.checkers.coverage import SUPERSEDED_REMOVED
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Buffer
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_tiering.core.superseded import OffsetSet
from stratalog_tiering.format.footer import AbortedTransaction
from stratalog_tiering.format.segment import audit_block, iterate_block_batches
from stratalog_tiering.maintenance.rewriting import stored_blocks
from stratalog_tiering.maintenance.superseded import Compacted, HistoryRead, history_to_read, remove_superseded
from stratalog_tiering.offload.ports import WorkerPorts

PAUSE_S = 0.5
STALE_S = 1.5
"""So long after the reading, at most, the removal begins."""


class HistoryCompactor:
    """Compacts one partition again and again, as an operator does, also after a failure. ``make_ports`` are its ports."""

    def __init__(self, world: World, topic_id: UUID, make_ports: Callable[[QuorumClient, Ports], WorkerPorts]) -> None:
        self._world = world
        self._topic_id = topic_id
        self._make_ports = make_ports
        self.stop = False

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        while True:
            await asyncio.sleep(ports.random.uniform(0.0, PAUSE_S))
            if self.stop:
                continue
            try:
                await self._compact(self._make_ports(client, ports), ports)
            except StratalogError as failure:
                self._world.note(f"  {machine.name}: {failure!r}")

    async def _compact(self, worker: WorkerPorts, ports: Ports) -> None:
        read = await history_to_read(worker, self._topic_id, 0)
        found = await _superseded(worker, read)
        await asyncio.sleep(ports.random.uniform(0.0, STALE_S))
        async for each in remove_superseded(worker, self._topic_id, 0, read, found):
            if isinstance(each, Compacted):
                self._world.coverage.meet(SUPERSEDED_REMOVED, each.records)


async def _superseded(worker: WorkerPorts, read: HistoryRead) -> OffsetSet:
    batches, aborted = list[Buffer](), list[AbortedTransaction]()
    for entry in read.segments:
        aborted += (await worker.source.footer(entry)).aborted_transactions
        async for content, block, cipher in stored_blocks(worker, entry):
            plain = audit_block(content, block, cipher=cipher, is_compacted=entry.is_compacted)
            batches += [batch for batch, _ in iterate_block_batches(plain)]
    return offset_set(superseded_offsets(batches, aborted, read.end_offset))
