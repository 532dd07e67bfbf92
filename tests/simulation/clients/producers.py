"""Producers of the simulated clusters: pipelines of idempotent batches like a Java client's, and unsafe ones.

An idempotent producer has up to ``in_flight_max`` batches of a partition in flight. If one is not acknowledged, it sends no new
ones, waits for the answers to the others, and resends the remaining batches in order, with their sequence numbers. A broker may
answer that a batch is out of order only if an earlier one of the pipeline was in flight, too. A batch that is acknowledged
before its predecessors makes no room: a broker recognises the last five batches of a producer, and would refuse the retry of an
earlier one. Java's producer keeps to this, too: it sends retries one at a time, before anything new.

An unsafe producer uses acks=1 or acks=0 and never retries: its records may be lost but must not be duplicated. The offset in an
acks=1 answer is the record's, if it survives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from simulation.checkers.coverage import REPEATED_TO_NEXT_OWNER, RETRIED_AT_NEXT_OWNER, SEVERAL_IN_FLIGHT
from simulation.clients.kafka import DUPLICATE_SEQUENCE, NONE, KafkaClient, NotServed
from simulation.world.machine import Machine, Ports, World
from stratalog_core.batches.records import Record, build_batch

if TYPE_CHECKING:
    from simulation.checkers.log_truth import Truth

RETRIABLE: Final = frozenset({2, 3, 5, 6, 7, 8, 9, 13, 15, 16, 19, 20, 56, 74, 76, 100})
OUT_OF_ORDER: Final = 45
PAUSE_MEAN_S: Final = 0.05
DECISION_BATCHES: Final = 20
"""The number of batches of a producer in one decision."""
BATCH_RECORDS: Final = (1, 1, 1, 2, 3, 8)
IN_FLIGHT: Final = (1, 2, 3, 4, 5)
NO_ANSWER: Final = -1


def make_batch(
    values: Sequence[bytes],
    timestamp_ms: int,
    producer: tuple[int, int] = (-1, -1),
    sequence: int = -1,
    attributes: int = 0,
) -> bytes:
    records = [Record(offset=offset, timestamp_ms=timestamp_ms, key=None, value=value) for offset, value in enumerate(values)]
    return bytes(
        build_batch(records, producer_id=producer[0], producer_epoch=producer[1], base_sequence=sequence, attributes=attributes)
    )


@dataclass(slots=True)
class _Batch:
    number: int
    """Position among all batches of its partition."""
    values: list[bytes]
    content: bytes
    leader: str | None = None
    """The broker that it was last sent to."""


@dataclass(slots=True)
class Pipeline:
    """Unacknowledged batches of one partition, in order. ``resending``: one of them failed."""

    sequence: int = 0
    count: int = 0
    """The number of batches so far, acknowledged or not."""
    batches: deque[_Batch] = field(default_factory=deque)
    sending: int = 0
    resending: bool = False
    last: _Batch | None = None
    """The batch that was acknowledged last."""

    def has_room(self, in_flight_max: int) -> bool:
        """Return whether one more batch is at most the ``in_flight_max``-th from the oldest unacknowledged one on."""
        return not self.batches or self.count - self.batches[0].number < in_flight_max

    def add(self, values: list[bytes], timestamp_ms: int, producer: tuple[int, int]) -> _Batch:
        batch = _Batch(self.count, values, make_batch(values, timestamp_ms, producer, self.sequence))
        self.count += 1
        self.sequence += len(values)
        self.batches.append(batch)
        return batch

    def acknowledge(self, batch: _Batch) -> None:
        self.batches.remove(batch)
        self.last = batch


class Producer:
    """Sends numbered records to all partitions, each until it is acknowledged."""

    def __init__(self, world: World, truth: Truth, name: str, topic: str, partitions: int, bootstrap: list[str]) -> None:
        self._world = world
        self._truth = truth
        self._name = name
        self._topic = topic
        self._bootstrap = bootstrap
        self._pipelines = [Pipeline() for _ in range(partitions)]
        self._in_flight_max = world.random(f"{name}/in flight").choice(IN_FLIGHT)
        self._tasks: set[asyncio.Task[None]] = set()
        self.stop = False
        self.stopped = asyncio.Event()
        self.hesitant = 0.05
        """The chance that a retry is late."""
        self.repeating = 0.1
        """The chance that an acknowledged batch is sent again, as by a network that delivers twice."""

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        producer = await self._identify(client)
        number = 0
        for turn in self._turns():
            partition = ports.random.randrange(len(self._pipelines))
            if self._world.decides(f"{self._name}/{turn // DECISION_BATCHES}"):
                number = await self._produce(client, ports, partition, producer, number)
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))
        self.check_stopped()

    def check_stopped(self) -> None:
        """Set ``stopped`` if ``stop`` is set and nothing is in flight."""
        if self.stop and not any(pipeline.batches for pipeline in self._pipelines):
            self.stopped.set()

    def add_partition(self) -> None:
        self._pipelines.append(Pipeline())

    def _turns(self) -> Iterator[int]:
        turn = 0
        while not self.stop:
            yield turn
            turn += 1

    async def _identify(self, client: KafkaClient) -> tuple[int, int]:
        while True:
            try:
                return await client.init_producer_id()
            except NotServed:
                await asyncio.sleep(0.1)

    async def _produce(self, client: KafkaClient, ports: Ports, partition: int, producer: tuple[int, int], number: int) -> int:
        """Add one batch to the partition's pipeline if there is room; return the next record's number."""
        pipeline = self._pipelines[partition]
        if not pipeline.has_room(self._in_flight_max):
            return number
        if not pipeline.batches:
            await self._repeat(client, ports, partition)
        values = [b"%s/%d" % (self._name.encode(), number + each) for each in range(ports.random.choice(BATCH_RECORDS))]
        self._truth.send(values)
        batch = pipeline.add(values, ports.clock.wall_ms(), producer)
        if len(pipeline.batches) > 1:
            self._world.coverage.meet(SEVERAL_IN_FLIGHT)
        if not pipeline.resending:
            self._send(client, ports, partition, batch, is_first=len(pipeline.batches) == 1)
        return number + len(values)

    async def _repeat(self, client: KafkaClient, ports: Ports, partition: int) -> None:
        batch = self._pipelines[partition].last
        if batch is None or ports.random.random() >= self.repeating:
            return
        client.forget(self._topic, partition)
        try:
            leader = await client.leader(self._topic, partition)
            error, offset = await client.produce(self._topic, partition, batch.content)
        except NotServed:
            return
        if error == NONE and offset >= 0:
            self._truth.acknowledge(partition, offset, batch.values)
            if leader != batch.leader:
                self._world.coverage.meet(REPEATED_TO_NEXT_OWNER)

    def _send(self, client: KafkaClient, ports: Ports, partition: int, batch: _Batch, *, is_first: bool) -> None:
        self._pipelines[partition].sending += 1
        task = asyncio.get_running_loop().create_task(self._deliver(client, ports, partition, batch, is_first))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, client: KafkaClient, ports: Ports, partition: int, batch: _Batch, is_first: bool) -> None:
        pipeline = self._pipelines[partition]

        def check_order() -> None:
            if pipeline.resending:
                # A batch before this one failed, perhaps before it was sent: no client sends one before its predecessor.
                raise NotServed("the batch is sent with its predecessors")

        try:
            leader = await client.leader(self._topic, partition)
            check_order()
            if batch.leader not in (None, leader):
                self._world.coverage.meet(RETRIED_AT_NEXT_OWNER)
            batch.leader = leader
            error, offset = await client.produce(self._topic, partition, batch.content, before_write=check_order)
        except NotServed:
            error, offset = NO_ANSWER, -1
        pipeline.sending -= 1
        if error in (NONE, DUPLICATE_SEQUENCE):
            if offset >= 0:
                self._truth.acknowledge(partition, offset, batch.values)
            pipeline.acknowledge(batch)
            self.check_stopped()
        else:
            may_fail = error in RETRIABLE or error == NO_ANSWER or (error == OUT_OF_ORDER and not is_first)
            assert may_fail, f"{self._name} got error {error} for {batch.values[0]!r} in {partition}"
            pipeline.resending = True
        if pipeline.resending and not pipeline.sending:
            await self._resend(client, ports, partition)

    async def _resend(self, client: KafkaClient, ports: Ports, partition: int) -> None:
        """Resend all remaining batches, in order."""
        client.forget(self._topic, partition)
        await asyncio.sleep(0.05 + 0.1 * ports.random.random() + self._hesitation_s(ports))
        pipeline = self._pipelines[partition]
        pipeline.resending = False
        for position, batch in enumerate(list(pipeline.batches)):
            self._send(client, ports, partition, batch, is_first=position == 0)

    def _hesitation_s(self, ports: Ports) -> float:
        """Return the delay of a retry. Some are late: the first attempt's ledger is then full, or there is another owner."""
        return ports.random.uniform(0.5, 4.0) if ports.random.random() < self.hesitant else 0.0


class UnsafeProducer:
    """Sends each batch once, with acks=1 or acks=0."""

    def __init__(self, world: World, truth: Truth, name: str, topic: str, partitions: int, bootstrap: list[str]) -> None:
        self._world = world
        self._truth = truth
        self._name = name
        self._topic = topic
        self._partitions = partitions
        self._bootstrap = bootstrap
        self.stop = False

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        number = turn = 0
        while not self.stop:
            partition = ports.random.randrange(self._partitions)
            if self._world.decides(f"{self._name}/{turn // DECISION_BATCHES}"):
                values = [b"%s/%d" % (self._name.encode(), number + each) for each in range(ports.random.choice(BATCH_RECORDS))]
                number += len(values)
                self._truth.send(values)
                await self._send_once(client, ports, partition, values)
            turn += 1
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))

    async def _send_once(self, client: KafkaClient, ports: Ports, partition: int, values: list[bytes]) -> None:
        acks = ports.random.choice([0, 1])
        try:
            error, offset = await client.produce(self._topic, partition, make_batch(values, ports.clock.wall_ms()), acks=acks)
        except NotServed:
            error, offset = NO_ANSWER, -1
        if error == NONE and acks == 1 and offset >= 0:
            self._truth.written_once(partition, offset, values)
        if error != NONE:
            client.forget(self._topic, partition)
