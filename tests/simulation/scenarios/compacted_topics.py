"""Scenario: compacted topics that brokers serve while workers compact them, under the faults of ``log``.

Producers write keyed records and tombstones, in transactions of both versions and without, to a topic with
``cleanup.policy=compact`` and one that also deletes. Ledgers are full after half a second, are offloaded at once, and their
records are compacted from then on. Readers of committed records, of all records, and one that fetches from replicas begin
anywhere, in gaps too. Partitions are handed over meanwhile, and an administrator deletes records. At the end everything is
compacted and read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final
from uuid import UUID

from chaos.compaction.readings import Seen
from chaos.compaction.sends import Place

from simulation.checkers.compacted_reads import CompactedReads
from simulation.checkers.transaction_outcomes import Outcomes
from simulation.clients.compacted_topics import (
    CompactedReader,
    KeyedProducer,
    KeyedTransactionalWriter,
    RecordDeleter,
    fetch,
    start_of,
)
from simulation.clients.kafka import NONE, KafkaClient
from simulation.clients.operators import order_handovers
from simulation.scenarios.checker_machine import in_time
from simulation.scenarios.cluster import FINISH_S, Cluster, bootstrap, create_topic
from simulation.scenarios.transactions import observed_timeouts
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_metadata.records import TierRequest, Topic, tier_request_key
from stratalog_metadata.state.commands import Command, Put

DELETE_RETENTION_MS: Final = 200
_COMPACTED: Final = {
    "segment.ms": "500", "local.retention.ms": "0", "min.insync.replicas": "1", "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1", "delete.retention.ms": str(DELETE_RETENTION_MS),
    "message.timestamp.after.max.ms": "86400000",
}  # fmt: skip
KEYED: Final = "keyed"
EXPIRING: Final = "keyed-expiring"
CONFIGS: Final[Mapping[str, Mapping[str, str]]] = {
    KEYED: {**_COMPACTED, "retention.ms": "-1"},
    EXPIRING: {**_COMPACTED, "cleanup.policy": "compact,delete", "retention.ms": "6000"},
}
PARTITIONS: Final[Mapping[str, int]] = {KEYED: 2, EXPIRING: 1}
PLACES: Final[tuple[Place, ...]] = tuple((topic, index) for topic, count in PARTITIONS.items() for index in range(count))
WRITERS: Final = ((KEYED, False), (KEYED, True), (EXPIRING, True))
"""The topic of each transactional writer, and whether it is of transaction version 2."""
READERS: Final = (("", True), (roles.RACKS[0], True), ("", False))
"""The rack of each reader, and whether it reads committed records only."""
SETTLE_S: Final = 5.0
"""Longer than it takes to remove an aborted transaction and its marker, while its owner remembers it."""
RETRY_S: Final = 0.2
FINAL_STARTS: Final = 3
"""From so many offsets of each partition the rest is read at the end, besides all of it."""


class Scenario(Cluster):
    """One run."""

    faults_s = 8.0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.outcomes = Outcomes()
        self.reads = CompactedReads(self.audit, world.coverage, world.loop.time)
        self._writers = [
            KeyedTransactionalWriter(
                world, self.reads, self.outcomes, f"t{number}", topic, PARTITIONS[topic], bootstrap(), is_v2=is_v2
            )
            for number, (topic, is_v2) in enumerate(WRITERS)
        ]
        self._producers = [
            KeyedProducer(world, self.reads, f"p{number}", topic, count, bootstrap())
            for number, (topic, count) in enumerate(PARTITIONS.items())
        ]
        self._readers = [
            CompactedReader(world, self.reads, PLACES, bootstrap(), rack, is_committed=is_committed)
            for rack, is_committed in READERS
        ]
        self._clients = [self._machine("writer", number, one.run) for number, one in enumerate(self._writers)]
        self._clients += [self._machine("producer", number, one.run) for number, one in enumerate(self._producers)]
        self._clients += [self._machine("reader", number, one.run) for number, one in enumerate(self._readers)]
        self._deleter = RecordDeleter(world, PLACES, frozenset({KEYED}), bootstrap())
        self._operators = [self._machine("mover", 0, order_handovers), self._machine("deleter", 0, self._deleter.run)]

    @property
    def partitions(self) -> int:
        return len(PLACES) + 2 * roles.OFFSETS_PARTITIONS

    def simulate(self) -> None:
        with observed_timeouts(self.outcomes.timed_out):
            super().simulate()

    def _authorities(self) -> list[Machine]:
        return [*super()._authorities(), *self._clients[: len(WRITERS)]]

    async def _create_topics(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self.world, ports, machine.name, bootstrap())
        for topic, configs in CONFIGS.items():
            await create_topic(client, topic, PARTITIONS[topic], self.replication_factor, configs)

    async def _finish(self) -> None:
        await self._pass(SETTLE_S)
        producers: list[KeyedTransactionalWriter | KeyedProducer] = [*self._writers, *self._producers]
        for producer in producers:
            producer.stop = True
        for reader in self._readers:
            reader.stop = True
        for producer in producers:
            await in_time(producer.stopped.wait(), "a producer still waits for an answer", FINISH_S)
        await self._in_checker(self._compact_everything)
        await self._in_checker(self._check_everything)
        self.world.note(f"{self.reads.sent} records sent, {len(self.bucket.objects)} objects")

    async def _compact_everything(self, machine: Machine, ports: Ports) -> None:
        """Request a compaction of every partition, once no transaction is open, and wait for its end."""
        kafka = KafkaClient(self.world, ports, machine.name, bootstrap())
        for place in PLACES:
            await self._read(kafka, place, 0, is_committed=True)
        client = await roles.connect_metadata(ports)
        await asyncio.sleep(DELETE_RETENTION_MS / 1000)
        keys = [tier_request_key(self._topic_id(topic), index) for topic, index in PLACES]
        for topic, index in PLACES:
            request = TierRequest(topic_id=self._topic_id(topic), index=index, delete_hot=True, compact=True)
            await client.propose(Command(updates=(Put(record=request),)))
        while any(found is not None for found in await client.read(keys)):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(RETRY_S)
        await client.close()

    def _topic_id(self, name: str) -> UUID:
        (found,) = (each for each in self.audit.records.values() if isinstance(each, Topic) and each.name == name)
        return found.topic_id

    async def _check_everything(self, machine: Machine, ports: Ports) -> None:
        """Read everything from the owners and from replicas, and some of it from offsets that may be in gaps."""
        owners = KafkaClient(self.world, ports, machine.name, bootstrap())
        replicas = KafkaClient(self.world, ports, machine.name, bootstrap(), rack=roles.RACKS[0])
        committed, uncommitted, starts = dict[Place, list[Seen]](), dict[Place, list[Seen]](), dict[Place, int]()
        for place in PLACES:
            uncommitted[place], _ = await self._read(owners, place, 0, is_committed=False)
            await self._read(replicas, place, 0, is_committed=True)
            committed[place], end = await self._read(owners, place, 0, is_committed=True)
            for offset in ports.random.sample(range(end), min(end, FINAL_STARTS)):
                found, _ = await self._read(owners, place, offset, is_committed=True)
                expected = [seen for seen in committed[place] if seen.offset >= offset]
                is_suffix = found == expected[len(expected) - len(found) :]
                self.audit.require(is_suffix, f"the reads of {place} from 0 and from {offset} differ")
            while (start := await start_of(owners, place)) is None:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(RETRY_S)
            starts[place] = start
            self._deleter.check_start(place, start)
        self.reads.check_final(committed, uncommitted, starts)

    async def _read(self, client: KafkaClient, place: Place, offset: int, *, is_committed: bool) -> tuple[list[Seen], int]:
        """Return all records from an offset on, once no transaction is open, and the offset after them."""
        records, until = list[Seen](), self.world.loop.time() + FINISH_S / 2
        while True:
            assert self.world.loop.time() < until, f"a reader of {place} does not come from {offset} to the end"
            fetched = await fetch(client, place, offset, is_committed=is_committed)
            if fetched is None or fetched.error != NONE:
                client.forget(*place)
                start = await start_of(client, place)
                offset = max(offset, start or 0)
                await asyncio.sleep(RETRY_S)
                continue
            records += self.reads.read(place, offset, fetched, is_committed=is_committed)
            offset = fetched.next_offset
            if offset >= fetched.high_watermark == fetched.last_stable_offset:
                return records, offset
