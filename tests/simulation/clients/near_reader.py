"""A consumer with a rack (KIP-392): it replays topics from their start, from whichever broker it is sent to.

Checked: a response holds the records that it asked for, without a gap; a replica never answers that a position is out of range,
serves nothing that was deleted ``DELETED_S`` before the fetch, and does not keep a reader at the end of its history; the reader
reaches every acknowledged record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from simulation.checkers.coverage import FROM_REPLICA
from simulation.checkers.log_truth import OFFSET_OUT_OF_RANGE, Truth
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_broker.requests.replica_reads import FRESH_S
from stratalog_metadata.records import Log, Topic, log_key, topic_key

PAUSE_MEAN_S: Final = 0.04
DELETED_S: Final = FRESH_S
AGAIN_SHARE: Final = 0.3
"""How often a replay that has reached the end begins again at the start."""
BACK_SHARE: Final = 0.15
"""How often another one does."""
PREFERRED_SHARE: Final = 0.3
"""How often it prefers some replica. Owners name one after a takeover only: in so short runs they have the rest in memory."""


@dataclass(frozen=True, slots=True)
class ReplayedTopic:
    """A topic to replay. Its records have no holes."""

    name: str
    partitions: int
    truth: Truth


class NearReader:
    """Runs until ``stop`` is set."""

    def __init__(
        self, world: World, topics: Callable[[], Iterable[ReplayedTopic]], bootstrap: list[str], rack: str = roles.RACKS[0]
    ) -> None:
        self._world = world
        self._topics = topics
        self._bootstrap = bootstrap
        self._rack = rack
        self._positions: dict[tuple[str, int], int] = {}
        self._starts: dict[tuple[str, int], list[tuple[float, int]]] = {}
        """When this reader first knew of each start of a log: a committed one, whichever broker knows of it."""
        self.reached: dict[tuple[str, int], int] = {}
        self.catches_up = False
        """Whether it begins again only at the end: else a long log's end takes exponentially many replays to reach."""
        self.stop = False

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap, rack=self._rack)
        while not self.stop:
            places = [(topic, index) for topic in self._topics() for index in range(topic.partitions)]
            if places:
                topic, partition = ports.random.choice(places)
                await self._read(client, topic, partition, ports)
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))

    def unread(self, topic: ReplayedTopic) -> list[tuple[int, int]]:
        """Return the partitions of which this reader has not reached the acknowledged end."""
        return [
            (partition, end)
            for partition, end in topic.truth.ends.items()
            if self.reached.get((topic.name, partition), 0) < end
        ]  # fmt: skip

    async def _read(self, client: KafkaClient, topic: ReplayedTopic, partition: int, ports: Ports) -> None:
        key = topic.name, partition
        if ports.random.random() < PREFERRED_SHARE:
            client.prefer(*key, ports.random.choice(self._bootstrap))
        offset = self._positions.get(key, 0)
        deleted_to = self._deleted_to(topic.name, partition)
        try:
            error, watermark, records = await client.fetch(topic.name, partition, offset, bytes_max=2_048, wait_ms=100)
        except NotServed:
            client.forget(*key)
            return
        is_near = client.was_near
        assert self._world.audit is not None
        if error != NONE:
            refused = not (is_near and error == OFFSET_OUT_OF_RANGE)
            self._world.audit.require(refused, f"a replica of {topic.name}-{partition} says that {offset} is out of range")
            client.forget(*key)
            if error == OFFSET_OUT_OF_RANGE:
                self._positions[key] = await self._start(client, *key, otherwise=offset)
            return
        served = not is_near or bool(records) or offset < watermark
        self._world.audit.require(served, f"a replica of {topic.name}-{partition} keeps a reader at {offset} of {watermark}")
        if is_near and records:
            self._world.coverage.meet(FROM_REPLICA)
            begins = records[0].offset
            self._world.audit.require(
                begins >= deleted_to, f"{topic.name}@{begins} was read after {deleted_to} had become the start"
            )
        for number, record in enumerate(records, offset):
            self._world.audit.require(
                record.offset == number, f"{topic.name}-{partition} was asked for {number} and serves {record.offset}"
            )
            topic.truth.see(partition, record)
        position = self._positions[key] = offset + len(records)
        self.reached[key] = max(position, self.reached.get(key, 0))
        is_at_end = not records and position >= watermark
        back_share = 0.0 if self.catches_up else BACK_SHARE
        if ports.random.random() < (AGAIN_SHARE if is_at_end else back_share):
            # A replica may be asked for what has been deleted meanwhile.
            self._positions[key] = 0

    async def _start(self, client: KafkaClient, topic: str, partition: int, *, otherwise: int) -> int:
        try:
            return await client.start_offset(topic, partition)
        except NotServed:
            return otherwise

    def _deleted_to(self, name: str, partition: int) -> int:
        """Return the start that the log has had for ``DELETED_S`` at least."""
        assert self._world.audit is not None
        records = self._world.audit.records
        topic = records.get(topic_key(name))
        log = records.get(log_key(topic.topic_id, partition)) if isinstance(topic, Topic) else None
        starts = self._starts.setdefault((name, partition), [(0.0, 0)])
        now = self._world.loop.time()
        if isinstance(log, Log) and log.log_start_offset > starts[-1][1]:
            starts.append((now, log.log_start_offset))
        return max((start for since, start in starts if since <= now - DELETED_S), default=0)
