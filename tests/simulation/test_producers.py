"""The simulated idempotent producer keeps to what a broker can recognise as retries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from simulation.clients.kafka import NONE, NotServed
from simulation.clients.producers import Pipeline, Producer
from stratalog_core.partition_state.producer_states import BATCHES_REMEMBERED


def test_a_batch_acknowledged_before_its_predecessors_makes_no_room() -> None:
    pipeline = Pipeline()
    first, *_, fifth = [pipeline.add([b"%d" % number], 0, (1, 0)) for number in range(BATCHES_REMEMBERED)]

    pipeline.acknowledge(fifth)

    assert not pipeline.has_room(BATCHES_REMEMBERED)

    pipeline.acknowledge(first)

    assert pipeline.has_room(BATCHES_REMEMBERED)


class LateConnections:
    """A client whose first request fails while the second waits for its connection. ``written`` are the batches that left."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self._calls = 0

    def forget(self, topic: str, partition: int) -> None:
        pass

    async def leader(self, topic: str, partition: int) -> str:
        return "broker-1"

    async def produce(self, topic: str, partition: int, batch: bytes, *, before_write: Callable[[], None]) -> tuple[int, int]:
        self._calls += 1
        if self._calls == 1:
            await asyncio.sleep(0.01)
            raise NotServed("the connection is refused")
        await asyncio.sleep(0.02)
        before_write()
        self.written.append(batch)
        return NONE, len(self.written) - 1


async def test_a_batch_that_waits_for_its_connection_is_not_sent_before_a_predecessor_that_failed() -> None:
    world: Any = SimpleNamespace(random=random.Random, coverage=SimpleNamespace(meet=lambda state: None))
    truth: Any = SimpleNamespace(acknowledge=lambda partition, offset, values: None)
    producer, client = Producer(world, truth, "p", "topic", 1, []), LateConnections()
    (pipeline,) = producer._pipelines
    ports: Any = SimpleNamespace(random=random.Random(0))
    first, second = (pipeline.add([value], 0, (1, 0)) for value in (b"first", b"second"))
    for batch in (first, second):
        producer._send(client, ports, 0, batch, is_first=batch is first)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        while pipeline.batches:  # noqa: ASYNC110 - the producer tells nobody
            await asyncio.sleep(0.01)
    assert client.written == [first.content, second.content]
