"""A step of ``transactions``: history is removed while a broker reads it.

The store has read the blocks, and their answer is on its way, when a client deletes the records and retention takes them out of
the manifest. The broker no longer knows which of them were aborted, and must not serve them to readers of committed records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from simulation.checkers.coverage import READ_OVERTAKEN
from simulation.checkers.transaction_outcomes import Outcomes
from simulation.clients.kafka import NONE, Fetched, KafkaClient, NotServed
from simulation.scenarios.cluster import bootstrap
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket
from stratalog_broker.reads.readable_log import cold_history
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Broker, Partition, Topic, TopicPartition, broker_key, partition_key, topic_key

LOOK_S: Final = 0.02
READ_S: Final = 4.0
"""Less than the client waits for an answer."""
DONE_S: Final = 30.0
VIEW_LAG_S: Final = 0.2
"""Longer than a broker's view is behind the quorum without faults."""


class OvertakenRead:
    """Nobody writes to ``topic`` any more, and what it holds has been checked: each run deletes one partition's history."""

    def __init__(self, world: World, bucket: Bucket, outcomes: Outcomes, topic: str, brokers: Sequence[Machine]) -> None:
        self._world = world
        self._bucket = bucket
        self._outcomes = outcomes
        self._topic = topic
        self._brokers = brokers

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        found = self._history(client.view)
        if found is not None:
            topic_partition, end_offset, replica = found
            await self._restart(client.view, replica)
            address = bootstrap()[roles.number_of(replica) - 1]
            await self._overtake(client.view, topic_partition, end_offset, address, machine, ports)
        await client.close()

    async def _restart(self, view: MetadataView, replica: Machine) -> None:
        """Restart a broker, so that it has nothing of the history in memory, and wait until it serves."""
        key = broker_key(roles.number_of(replica))
        before = view.find(Broker, key)
        replica.crash()
        replica.boot()
        async with asyncio.timeout(DONE_S):
            while (now := view.find(Broker, key)) is None or now == before:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(LOOK_S)

    def _history(self, view: MetadataView) -> tuple[TopicPartition, int, Machine] | None:
        """Return the partition with the most history that only the store has, its end, and a broker that does not own it."""
        topic = view.find(Topic, topic_key(self._topic))
        assert topic is not None, "it has been written to"
        places = [TopicPartition(topic.topic_id, index) for index in range(topic.partition_count)]
        ends = [(history.core.end_offset, place) for place in places if (history := cold_history(view, place)) is not None]
        if not ends:
            return None
        end_offset, place = max(ends, key=lambda pair: pair[0])
        owned = view.find(Partition, partition_key(place.topic_id, place.partition))
        assert owned is not None, "it has been read"
        return place, end_offset, next(each for each in self._brokers if roles.number_of(each) != owned.owner)

    async def _overtake(
        self, view: MetadataView, place: TopicPartition, end_offset: int, replica: str, machine: Machine, ports: Ports
    ) -> None:
        reader = KafkaClient(self._world, ports, machine.name, bootstrap(), rack=roles.RACKS[0])
        deleter = KafkaClient(self._world, ports, machine.name, bootstrap())
        self._bucket.faults.holds_blocks = True
        reading = asyncio.ensure_future(self._read(reader, place.partition, replica))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_S):
                    while not self._bucket.held_reads:  # noqa: ASYNC110 - no event tells
                        await asyncio.sleep(LOOK_S)
                    await self._delete(deleter, place.partition, end_offset)
                    while cold_history(view, place) is not None:  # noqa: ASYNC110 - no event tells
                        await asyncio.sleep(LOOK_S)
                    await asyncio.sleep(VIEW_LAG_S)
                    self._world.coverage.meet(READ_OVERTAKEN, not reading.done())
        finally:
            self._bucket.faults.holds_blocks = False
        fetched = await reading
        if fetched is not None:
            self._outcomes.check_read([record.value or b"" for record in fetched.records])

    async def _read(self, reader: KafkaClient, partition: int, replica: str) -> Fetched | None:
        """Return what the replica answers to a reader of committed records; None if it does not answer in time."""
        until = self._world.loop.time() + READ_S
        while self._world.loop.time() < until:
            reader.prefer(self._topic, partition, replica)
            wait_ms = int(1000 * READ_S)
            with contextlib.suppress(NotServed):
                fetched = await reader.fetch_isolated(self._topic, partition, 0, 1 << 20, wait_ms, is_committed=True)
                if fetched.error == NONE:
                    return fetched
            reader.forget(self._topic, partition)
            await asyncio.sleep(LOOK_S)
        return None

    async def _delete(self, deleter: KafkaClient, partition: int, end_offset: int) -> None:
        while True:
            with contextlib.suppress(NotServed):
                if await deleter.delete_records(self._topic, partition, end_offset) == NONE:
                    return
            deleter.forget(self._topic, partition)
            await asyncio.sleep(LOOK_S)
