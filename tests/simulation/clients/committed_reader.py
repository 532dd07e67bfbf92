"""A reader of committed records: reads each partition from random offsets on while transactions go on."""

from __future__ import annotations

import asyncio
from typing import Final

from simulation.checkers.committed_reads import CommittedReads
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.world.machine import Machine, Ports, World

PAUSE_MEAN_S: Final = 0.1
BACK_CHANCE: Final = 0.2
"""How often it begins anew somewhere earlier: there, history is hot or cold, in ledgers of earlier owners."""


class CommittedReader:
    """Runs until ``stop`` is set."""

    def __init__(
        self, world: World, reads: CommittedReads, topic: str, partitions: int, bootstrap: list[str], rack: str = ""
    ) -> None:
        """``rack``: see ``KafkaClient``."""
        self._rack = rack
        self._world = world
        self._reads = reads
        self._topic = topic
        self._partitions = partitions
        self._bootstrap = bootstrap
        self.stop = False

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap, rack=self._rack)
        offsets = [0] * self._partitions
        while not self.stop:
            partition = ports.random.randrange(self._partitions)
            offset = offsets[partition]
            if ports.random.random() < BACK_CHANCE:
                offset = ports.random.randrange(offset + 1)
            offsets[partition] = await self._read(client, partition, offset)
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))

    async def _read(self, client: KafkaClient, partition: int, offset: int) -> int:
        """Read once; return the next offset."""
        try:
            fetched = await client.fetch_committed(self._topic, partition, offset, bytes_max=2_048)
        except NotServed:
            fetched = None
        if fetched is None or fetched.error != NONE:
            client.forget(self._topic, partition)
            return offset
        self._reads.read(partition, offset, fetched.next_offset, fetched.records)
        return fetched.next_offset
