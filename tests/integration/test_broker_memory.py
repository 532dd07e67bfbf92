"""A broker process stays within its memory budget whatever clients do: resident memory, as the system counts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from unittest import mock

import psutil
import pytest
from confluent_kafka.admin import NewTopic
from integration.process_cluster import ProcessCluster
from kio.schema.errors import ErrorCode
from unit.broker.raw_client import RawClient, batch, fetch_request, produce_request, request

from stratalog_broker.protocol.entities import encode_response as encode_entity

pytestmark = [pytest.mark.alone, pytest.mark.integration, pytest.mark.timeout(600)]
MIB = 1024 * 1024
BUDGET = 96 * MIB
PARTITIONS = 200
SAMPLE_S = 0.02
UNREAD_FETCHES = 32
"""Fetches of a client that takes nothing. A large batch for each is more than the kernel keeps for a socket, 4 MiB by default:
the broker has to hold the rest."""
TIMEOUT_S = 240
"""Of waits that end soon, unless something is broken: the machine may be busy."""


@pytest.fixture(scope="module")
def small_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A cluster of one broker with a small budget, one bookie and one metadata node."""
    running = ProcessCluster(tmp_path_factory.mktemp("memory"))
    with mock.patch.dict(os.environ, {"STRATALOG_BROKER_MEMORY_BYTES": str(BUDGET)}):
        running.run("cluster", "start", "--metadata", "1", "--bookies", "1", "--brokers", "1", "--tiering", "0")
    try:
        yield running
    finally:
        running.run("cluster", "stop")


class Resident:
    """Resident memory of the broker, sampled while loads run."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.base = self.now
        self.highest = self.base

    @property
    def now(self) -> int:
        return int(self._process.memory_info().rss)

    @asynccontextmanager
    async def watched(self, load: str) -> AsyncIterator[None]:
        """Fail if the broker exceeds its budget inside the context."""
        self.highest = 0
        sampling = asyncio.ensure_future(self._sample())
        try:
            yield
        finally:
            sampling.cancel()
        over = (self.highest - self.base) / BUDGET
        assert over <= 1.25, (
            f"{load}: {self.highest} bytes resident are {over:.2f} times the budget above {self.base} at the start"
        )

    async def falls_to(self, share: float) -> None:
        """Wait until at most this share of the budget is resident above the base, as after a peak."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.now - self.base > share * BUDGET:  # noqa: ASYNC110 - another process's memory
                await asyncio.sleep(0.2)

    async def _sample(self) -> None:
        while True:
            self.highest = max(self.highest, self.now)
            await asyncio.sleep(SAMPLE_S)


async def warmed_up(cluster: ProcessCluster, topic: str) -> None:
    """Create ``topic`` and wait until every partition accepts appends."""
    (created,) = cluster.admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values()
    await asyncio.to_thread(created.result, 30)
    client = await RawClient.connect(cluster.bootstrap)
    async with asyncio.timeout(TIMEOUT_S):
        for partition in range(PARTITIONS):
            while not await is_appended(client, topic, partition):  # noqa: ASYNC110 - only answers tell
                await asyncio.sleep(0.05)
    await client.close()


async def is_appended(client: RawClient, topic: str, partition: int) -> bool:
    answer = await client.call(0, 9, produce_request(topic, partition, batch(b"first")))
    return answer.responses[0].partition_responses[0].error_code is ErrorCode.none


def produce_body(topic: str, records: bytes, partitions: Sequence[int]) -> bytes:
    """Return a Produce request with one batch for each partition."""
    lines = tuple(request(0, 9, "PartitionProduceData", index=partition, records=records) for partition in partitions)
    whole = produce_request(topic, 0, records)
    topics = (request(0, 9, "TopicProduceData", name=topic, partition_data=lines),)
    return encode_entity(type(whole)(transactional_id=None, acks=-1, timeout=whole.timeout, topic_data=topics))


async def produce(bootstrap: str, body: bytes, requests: int, under_way: int) -> None:
    client = await RawClient.connect(bootstrap)
    for number in range(requests + under_way):
        if number < requests:
            client.send(0, 9, body)
        if number >= under_way:
            answer = await client.receive()
            assert {line.error_code.value for topic in answer.responses for line in topic.partition_responses} == {0}
    await client.close()


async def read_slowly(bootstrap: str, topic: str, partition: int) -> socket.socket:
    """Send fetches for everything, repeatedly, without reading the answers; return the socket."""
    host, port = bootstrap.rsplit(":", 1)
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    reader.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(reader, (host, int(port)))
    body = encode_entity(fetch_request(topic, 0, partition=partition, max_wait_ms=5_000, max_bytes=32 * MIB))
    head = b"\x00\x01\x00\x0b\x00\x00\x00\x01\x00\x03raw"
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(reader, ((len(head) + len(body)).to_bytes(4, "big") + head + body) * UNREAD_FETCHES)
    return reader


async def catch_up(bootstrap: str, topic: str, partition: int) -> None:
    """Read a partition from its beginning to its end. Like any consumer, connect again if the connection is closed."""
    client = await RawClient.connect(bootstrap)
    offset, end = 0, 1
    while offset < end:
        wanted = fetch_request(topic, offset, partition=partition, max_wait_ms=2_000, max_bytes=2 * MIB)
        try:
            answer = await client.call(1, 11, wanted)
        except (ConnectionError, EOFError):
            # This process was not scheduled for so long that it was the one that had read nothing for the longest time.
            await client.close()
            client = await RawClient.connect(bootstrap)
            continue
        line = answer.responses[0].partitions[0]
        end = line.high_watermark
        records = bytes(line.records or b"")
        while records:
            offset = int.from_bytes(records[:8], "big") + int.from_bytes(records[23:27], "big") + 1
            records = records[12 + int.from_bytes(records[8:12], "big") :]
    await client.close()


async def test_resident_memory_stays_within_the_budget(small_cluster: ProcessCluster) -> None:
    bootstrap = small_cluster.bootstrap
    for name in ("small", "large"):
        await warmed_up(small_cluster, name)
    await catch_up(bootstrap, "small", 0)
    (broker,) = small_cluster.processes("broker")
    resident = Resident(broker["pid"])
    small, large = batch(b"x" * 100), batch(os.urandom(900_000))
    assert len(small) == 170

    async with resident.watched("small batches, one for each of many partitions"):
        body = produce_body("small", small, range(PARTITIONS))
        await asyncio.gather(*(produce(bootstrap, body, 350, 10) for _ in range(2)))
    async with resident.watched("large batches"):
        bodies = [produce_body("large", large, [partition]) for partition in range(4)]
        await asyncio.gather(*(produce(bootstrap, body, 30, 4) for body in bodies))
    async with resident.watched("more requests at once than fit"):
        body = produce_body("large", large, range(8))
        await asyncio.gather(*(produce(bootstrap, body, 2, 2) for _ in range(12)))
    await resident.falls_to(0.75)
    async with resident.watched("consumers that catch up"):
        await asyncio.gather(*(catch_up(bootstrap, name, partition) for name in ("small", "large") for partition in range(4)))
    async with resident.watched("consumers that take nothing"):
        readers = [await read_slowly(bootstrap, name, number % 4) for number in range(40) for name in ("small", "large")]
        log = small_cluster.data / "logs" / "broker-1.log"
        async with asyncio.timeout(TIMEOUT_S):  # Clients that take nothing are closed for the sake of the others.
            while "this one has read none for the longest time" not in log.read_text():
                await catch_up(bootstrap, "large", 1)
        await catch_up(bootstrap, "small", 1)
        for reader in readers:
            reader.close()
    await resident.falls_to(0.75)
