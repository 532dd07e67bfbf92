"""A fetch that waits: it is woken by what it waits for, also by what came between its look and its wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest_asyncio
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster
from unit.broker.raw_client import batch, fetch_request, produce
from unit.broker.test_failover import create_topic

from stratalog_broker.context import RequestContext
from stratalog_broker.handlers.fetch import FetchCall, handle_raw
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_core.ports import Buffer

_WAIT_MS = 600_000


class Connection:
    """Keeps the one answer."""

    client_host = "test"

    def __init__(self) -> None:
        self.answer = b""

    def respond(self, context: RequestContext, parts: Sequence[Buffer]) -> None:
        self.answer = b"".join(parts)

    def released(self, request_bytes: int) -> None: ...

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path) as running:
        await in_thread(partial(create_topic, running, "topic", 1))
        yield running


def context_of(cluster: MiniCluster, connection: Connection) -> RequestContext:
    return RequestContext(
        cluster.broker.services, connection, api_key=1, api_version=11, correlation_id=1, client_id="", request_bytes=0
    )


async def test_what_is_confirmed_between_the_look_and_the_wait_is_answered_at_once(cluster: MiniCluster) -> None:
    client, connection = await cluster.connect(), Connection()
    assert (await produce(client, "topic", batch(b"first"))).error_code == 0
    body = memoryview(encode_entity(fetch_request("topic", 1, max_wait_ms=_WAIT_MS)))
    waiting = handle_raw(context_of(cluster, connection), body)
    assert waiting is not None
    assert (await produce(client, "topic", batch(b"second"))).error_code == 0
    async with asyncio.timeout(20):
        await waiting
    assert b"second" in connection.answer


async def test_only_partitions_that_moved_are_looked_at_again(cluster: MiniCluster) -> None:
    client, connection = await cluster.connect(), Connection()
    for partition in range(3):
        assert (await produce(client, "topic", batch(b"first"), partition=partition)).error_code == 0
    request = fetch_request("topic", 1, max_wait_ms=_WAIT_MS)
    (topic,) = request.topics
    (wanted,) = topic.partitions
    partitions = tuple(replace(wanted, partition=index) for index in range(3))
    request = replace(request, topics=(replace(topic, partitions=partitions),))
    looked_at: list[int] = []

    class Watched(FetchCall):
        def _look_at(self, line: int) -> None:
            looked_at.append(line)
            super()._look_at(line)

    fetch = Watched(context_of(cluster, connection), request)
    assert not fetch.collect()
    waiting = asyncio.create_task(fetch.wait())
    assert (await produce(client, "topic", batch(b"second"), partition=1)).error_code == 0
    async with asyncio.timeout(20):
        await waiting
    assert looked_at == [0, 1, 2, 1]
    assert b"second" in connection.answer
