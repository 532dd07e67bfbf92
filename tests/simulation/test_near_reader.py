"""The simulated reader with a rack reaches the end of a log in time that grows with the log's length, and no faster."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from simulation.clients.kafka import NONE
from simulation.clients.near_reader import NearReader, ReplayedTopic

RECORDS, FETCHED = 4_000, 20


class LongLog:
    """A client whose fetches return ``FETCHED`` of ``RECORDS`` records each, from the owner."""

    was_near = False

    def __init__(self) -> None:
        self.offsets: list[int] = []

    def prefer(self, topic: str, partition: int, address: str) -> None: ...

    async def fetch(self, topic: str, partition: int, offset: int, **limits: int) -> tuple[int, int, list[Any]]:
        self.offsets.append(offset)
        return NONE, RECORDS, [SimpleNamespace(offset=each) for each in range(offset, min(offset + FETCHED, RECORDS))]


def reader_of(client: LongLog) -> tuple[NearReader, ReplayedTopic]:
    audit = SimpleNamespace(records={}, require=lambda holds, failure: None)
    world: Any = SimpleNamespace(audit=audit, loop=SimpleNamespace(time=lambda: 0.0))
    truth: Any = SimpleNamespace(ends={0: RECORDS}, see=lambda partition, record: None)
    topic = ReplayedTopic("topic", 1, truth)
    return NearReader(world, lambda: [topic], ["broker-1:9092"]), topic


async def read(reader: NearReader, topic: ReplayedTopic, client: LongLog, times: int) -> None:
    ports: Any = SimpleNamespace(random=random.Random(0))
    for _ in range(times):
        await reader._read(client, topic, 0, ports)  # type: ignore[arg-type]


async def test_a_reader_that_catches_up_reaches_the_end_of_a_long_log_in_one_replay() -> None:
    client = LongLog()
    reader, topic = reader_of(client)
    reader.catches_up = True

    await read(reader, topic, client, RECORDS // FETCHED)

    assert reader.unread(topic) == []
    assert client.offsets == list(range(0, RECORDS, FETCHED))


async def test_a_reader_begins_again_from_anywhere_before_and_from_the_end_after() -> None:
    client = LongLog()
    reader, topic = reader_of(client)

    await read(reader, topic, client, RECORDS // FETCHED)

    assert client.offsets.count(0) > 1, "replicas are asked for what may have been deleted meanwhile"
    assert reader.unread(topic), "an end that 200 fetches are away is reached by no replay"

    reader.catches_up = True
    client.offsets.clear()

    await read(reader, topic, client, 3 * RECORDS // FETCHED)

    assert reader.unread(topic) == []
    assert 0 in client.offsets, "at the end it begins again"
