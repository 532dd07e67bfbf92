"""Counts the operations of a produce and of a fetch: no clock, no noise. Each bound is today's count; lower it when it falls.

Three copies, acknowledged by all three, so that a scenario is over when its answer is there. Sends and receives are those of
asyncio's own loop; uvloop does as many.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from unit.broker import mini_cluster as clusters
from unit.broker.mini_cluster import in_thread, run_cluster
from unit.broker.operation_tally import CountingFiles, CountingTransport, Tally
from unit.broker.partitions.test_failover import PARTITIONS, create_topic
from unit.broker.raw_client import RawClient, batch, fetch, fetch_request, produce, produce_request, request

from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_metadata.protocol.messages import PROPOSE

pytestmark = pytest.mark.alone
REQUESTS = 8
SMALL, LARGE = b"x" * 1000, b"x" * 900_000
CALLS_SLACK = 0.1
"""Calls of our functions may be a tenth more: to take one apart is no regression."""

Scenario = Callable[[RawClient], Awaitable[None]]

COMMON = {
    # A produce never asks the metadata quorum for anything.
    f"request 0x{PROPOSE:04x}": 0,
    # One request to each bookie, whatever the number of batches; each bookie writes once and syncs once. The kernel does both
    # by itself where it can, else a thread, with a future.
    "request 0x0201": 3,
    "writes without a thread": 3,
    "writes": 3,
    # Around the page cache where the file system can, else through it.
    "pwrite (others)": 3,
    "pwritev (others)": 3,
    "datasyncs": 3,
    "fdatasync (others)": 3,
    "call_soon_threadsafe": 3,
    "run_in_executor": 0,
    "create_task": 0,
    "create_future": 3,
}
SOCKETS = {
    "recv_into (client's connection)": 1,
    "send (client's connection)": 1,
    # To each bookie and back.
    "send (between ours)": 6,
    "recv_into (between ours)": 6,
}


@pytest_asyncio.fixture
async def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RawClient, Tally]]:
    """A client of a broker with three bookies and a metadata node, all in one thread, and the tally of what they do."""
    tally = Tally()
    monkeypatch.setattr(clusters, "TcpTransport", partial(CountingTransport, tally))
    monkeypatch.setattr(clusters, "SystemFiles", partial(CountingFiles, tally=tally))
    with tally.hooked():
        # A lease that is renewed rarely: heartbeats are no part of a scenario.
        async with run_cluster(tmp_path, bookies=3, lease_ms=30_000) as cluster:
            await in_thread(partial(create_topic, cluster, "topic", 3, **{"min.insync.replicas": "3"}))
            client = await cluster.connect()
            for partition in range(PARTITIONS):
                # A machine that stands still for seconds may let a produce time out: it is asked again, as clients do.
                while (await produce(client, "topic", batch(SMALL), partition=partition)).error_code:  # noqa: ASYNC110 - it is an answer that is waited for
                    await asyncio.sleep(0.05)
            yield client, tally


async def one_batch(client: RawClient) -> None:
    assert (await produce(client, "topic", batch(SMALL))).error_code == 0


async def one_large_batch(client: RawClient) -> None:
    assert (await produce(client, "topic", batch(LARGE))).error_code == 0


async def pipelined(client: RawClient) -> None:
    body = encode_entity(produce_request("topic", 0, batch(SMALL)))
    for _ in range(REQUESTS):
        client.send(0, 9, body)
    for _ in range(REQUESTS):
        await client.receive()


async def many_partitions(client: RawClient) -> None:
    data = tuple(request(0, 9, "PartitionProduceData", index=index, records=batch(SMALL)) for index in range(PARTITIONS))
    topic = request(0, 9, "TopicProduceData", name="topic", partition_data=data)
    timeout = datetime.timedelta(seconds=10)
    await client.call(
        0, 9, request(0, 9, "ProduceRequest", transactional_id=None, acks=-1, timeout=timeout, topic_data=(topic,))
    )


async def tail_fetch(client: RawClient) -> None:
    assert (await fetch(client, "topic", 0)).error_code == 0


async def waiting_fetch(client: RawClient) -> None:
    """Two produces, of which the second wakes a fetch."""
    end_offset = (await produce(client, "topic", batch(SMALL))).base_offset + 1
    client.send(1, 11, encode_entity(fetch_request("topic", end_offset, max_wait_ms=60_000)))
    client.send(0, 9, encode_entity(produce_request("topic", 0, batch(SMALL))))
    await client.receive()
    await client.receive()


@pytest.mark.parametrize(
    ("scenario", "bounds"),
    [
        pytest.param(
            one_batch,
            {
                **COMMON,
                **SOCKETS,
                "frame bytes": 3321,
                "call_soon": 14,
                "call_at": 4,
                "calls in stratalog_broker": 73,
                "calls in stratalog_bookies": 190,
                "calls in stratalog_core": 133,
            },
            id="one batch",
        ),
        pytest.param(
            pipelined,
            {
                **COMMON,
                **SOCKETS,
                "frame bytes": 26_484,
                "call_soon": 14,
                "call_at": 4,
                "calls in stratalog_broker": 521,
                "calls in stratalog_bookies": 281,
                "calls in stratalog_core": 204,
            },
            id="eight requests at once",
        ),
        pytest.param(
            many_partitions,
            {
                **COMMON,
                **SOCKETS,
                "frame bytes": 13_248,
                "call_soon": 14,
                "call_at": 4,
                "calls in stratalog_broker": 148,
                "calls in stratalog_bookies": 235,
                "calls in stratalog_core": 188,
            },
            id="one request for four partitions",
        ),
        # How often a large frame's socket is written to and read is up to the system's buffers.
        pytest.param(
            one_large_batch,
            {**COMMON, "frame bytes": 2_700_327, "payload buffers sent": 1, "calls in stratalog_bookies": 190},
            id="one large batch, its memory shared by all copies",
        ),
        pytest.param(
            tail_fetch,
            {
                "recv_into (client's connection)": 1,
                "send (client's connection)": 1,
                "call_soon": 5,
                "call_at": 4,
                "create_future": 0,
                "create_task": 0,
                "request 0x0202": 0,
                "pread (others)": 0,
                "calls in stratalog_broker": 60,
                "calls in stratalog_bookies": 0,
                "calls in stratalog_core": 5,
            },
            id="a fetch from the tail cache",
        ),
        pytest.param(
            waiting_fetch,
            {
                # Twice those of one batch; and of the fetch no task, no future, one timer.
                "create_task": 0,
                "create_future": 6,
                "call_soon": 29,
                "call_at": 4,
                "calls in stratalog_broker": 215,
            },
            id="a fetch that waits",
        ),
    ],
)
async def test_no_more_is_done_than_was_measured(
    counted: tuple[RawClient, Tally], scenario: Scenario, bounds: dict[str, int]
) -> None:
    client, tally = counted
    counts = await tally.of(partial(scenario, client))
    assert {
        name: f"{counts[name]}, bound {bound}" for name, bound in bounds.items() if counts.get(name, 0) > _limit(name, bound)
    } == {}
    # The hook sees what it is there to see.
    assert counts["calls in stratalog_broker"] > 0


def _limit(name: str, bound: int) -> float:
    return bound * (1 + CALLS_SLACK) if name.startswith("calls in ") else bound
