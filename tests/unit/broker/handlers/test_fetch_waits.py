"""A waiting fetch is woken by new records, also by those confirmed between its first check and its wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_all_served
from unit.broker.partitions.test_failover import create_topic
from unit.broker.raw_client import batch, fetch_request, produce

from stratalog_broker.handlers.fetch import FetchCall, FetchHandler
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.protocol.fetch_request import parse_request
from stratalog_broker.requests.context import UNKNOWN_SOFTWARE, RequestContext
from stratalog_broker.requests.handler_info import Waiting
from stratalog_broker.requests.principal import ANONYMOUS, Principal
from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.errors import Overloaded, StratalogError, Unavailable
from stratalog_core.ports import Buffer

_WAIT_MS = 600_000


class Connection:
    """Keeps the only response."""

    client_host = "test"
    client_port = 0
    client_software = UNKNOWN_SOFTWARE
    listener = ""

    def __init__(self) -> None:
        self.answer = b""
        self.released_bytes = 0
        self.closed_for: list[str] = []
        self.is_over = asyncio.Event()

    principal: Principal | None = ANONYMOUS

    def respond(self, context: RequestContext, parts: Sequence[Buffer]) -> None:
        self.answer = b"".join(parts)
        self.is_over.set()

    def charge(self, more_bytes: int) -> bool:
        return more_bytes >= 0

    def released(self, request_bytes: int) -> None:
        self.released_bytes += request_bytes

    def close(self, reason: str) -> None:
        self.closed_for.append(reason)
        self.is_over.set()

    async def over(self) -> None:
        async with asyncio.timeout(60):
            await self.is_over.wait()


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path) as running:
        await in_thread(partial(create_topic, running, "topic", 1))
        await until_all_served(running)
        yield running


def context_of(connection: Connection) -> RequestContext:
    return RequestContext(connection, api_key=1, api_version=11, correlation_id=1, client_id="", request_bytes=7)


def handler_of(cluster: MiniCluster) -> FetchHandler:
    handle: Any = cluster.broker.apis.by_key[1].handle_raw
    handler = handle.__self__
    assert isinstance(handler, FetchHandler)
    return handler


def fetch(cluster: MiniCluster, connection: Connection, body: memoryview) -> Waiting | None:
    return handler_of(cluster)(context_of(connection), body)


def body_of(offset: int, *, max_wait_ms: int = _WAIT_MS) -> memoryview:
    return memoryview(encode_entity(fetch_request("topic", offset, max_wait_ms=max_wait_ms)))


def watchers_of(cluster: MiniCluster) -> int:
    return sum(len(log.watchers) for log in cluster.broker.partitions.all())


async def test_a_confirmed_batch_wakes_a_waiting_fetch(cluster: MiniCluster) -> None:
    client, connection = await cluster.connect(), Connection()
    assert (await produce(client, "topic", batch(b"first"))).error_code == 0
    assert fetch(cluster, connection, body_of(1)) is not None
    assert watchers_of(cluster) == 1
    assert (await produce(client, "topic", batch(b"second"))).error_code == 0
    await connection.over()
    assert b"second" in connection.answer
    assert (watchers_of(cluster), connection.released_bytes) == (0, 7)


async def test_records_confirmed_during_a_slow_read_are_returned(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client, connection = await cluster.connect(), Connection()
    assert (await produce(client, "topic", batch(b"first"))).error_code == 0
    broker = cluster.broker
    (log,) = [log for log in broker.partitions.all() if log.core.next_offset and log.topic_partition.partition == 0]
    log.tail.clear()
    may_read = asyncio.Event()

    async def not_yet(*arguments: object) -> BatchRun:
        await may_read.wait()
        raise Unavailable("later")

    with monkeypatch.context() as patch:
        patch.setattr(broker.reader, "read", not_yet)
        assert fetch(cluster, connection, body_of(0)) is not None
        assert watchers_of(cluster) == 0
        assert (await produce(client, "topic", batch(b"second"))).error_code == 0
    may_read.set()
    await connection.over()
    assert b"first" in connection.answer
    assert b"second" in connection.answer


async def test_a_fetch_is_answered_empty_after_its_maximum_wait(cluster: MiniCluster) -> None:
    client, connection = await cluster.connect(), Connection()
    assert (await produce(client, "topic", batch(b"first"))).error_code == 0
    assert fetch(cluster, connection, body_of(1, max_wait_ms=1)) is not None
    await connection.over()
    assert connection.answer
    assert (watchers_of(cluster), connection.released_bytes) == (0, 7)


async def test_a_closed_connection_leaves_no_watchers(cluster: MiniCluster) -> None:
    client, connection = await cluster.connect(), Connection()
    assert (await produce(client, "topic", batch(b"first"))).error_code == 0
    waiting = fetch(cluster, connection, body_of(1))
    assert waiting is not None
    waiting.cancel()
    assert (watchers_of(cluster), connection.released_bytes) == (0, 7)
    assert (await produce(client, "topic", batch(b"second"))).error_code == 0
    assert connection.answer == b""


async def test_an_unexpected_error_closes_the_connection_and_is_logged(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, connection = await cluster.connect(), Connection()
    assert (await produce(client, "topic", batch(b"first"))).error_code == 0
    assert fetch(cluster, connection, body_of(1)) is not None

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FetchCall, "_look_at", fail)
    assert (await produce(client, "topic", batch(b"second"))).error_code == 0
    await connection.over()
    assert connection.closed_for
    assert (watchers_of(cluster), connection.released_bytes) == (0, 7)
    assert "ZeroDivisionError" in caplog.text


async def test_only_partitions_with_new_records_are_checked_again(cluster: MiniCluster) -> None:
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

    watched = Watched(handler_of(cluster), context_of(connection), parse_request(memoryview(encode_entity(request)), 11))
    assert not watched.start()
    assert (await produce(client, "topic", batch(b"second"), partition=1)).error_code == 0
    await connection.over()
    assert looked_at == [0, 1, 2, 1]
    assert b"second" in connection.answer


async def test_a_read_that_fails_is_not_repeated_at_once_beside_a_partition_that_is_handed_over(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition whose next owner is not certain yet seemed to have moved after each read: the fetch occupied a core."""
    client, connection = await cluster.connect(), Connection()
    for partition in range(2):
        assert (await produce(client, "topic", batch(b"first"), partition=partition)).error_code == 0
    logs = {log.topic_partition.partition: log for log in cluster.broker.partitions.all() if log.core.next_offset}
    logs[0].is_releasing = True
    logs[1].tail.clear()
    reads: list[int] = []

    async def fail(*arguments: Any) -> BatchRun:
        reads.append(arguments[1])
        raise Unavailable("later")

    monkeypatch.setattr(cluster.broker.reader, "read", fail)
    request = fetch_request("topic", 0, max_wait_ms=_WAIT_MS)
    (topic,) = request.topics
    (wanted,) = topic.partitions
    partitions = tuple(replace(wanted, partition=index) for index in range(2))
    body = memoryview(encode_entity(replace(request, topics=(replace(topic, partitions=partitions),))))
    assert fetch(cluster, connection, body) is not None
    async with asyncio.timeout(60):
        while not watchers_of(cluster) and len(reads) < 10:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
    assert (reads, watchers_of(cluster)) == ([0], 2)
    logs[0].is_releasing = False
    logs[0].notify()
    await connection.over()
    assert b"first" in connection.answer


@pytest.mark.parametrize("refusal", [Unavailable("later"), Overloaded("too many reads")])
@pytest.mark.parametrize("elsewhere", [{"partition": 1000}, {"partition": 2, "current_leader_epoch": 1000}])
async def test_a_failed_read_is_not_repeated_at_once_beside_a_partition_with_an_error_and_a_handover(
    cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch, refusal: StratalogError, elsewhere: dict[str, int]
) -> None:
    """The partition with the error seemed to have moved after each read."""
    client, connection = await cluster.connect(), Connection()
    for partition in range(3):
        assert (await produce(client, "topic", batch(b"first"), partition=partition)).error_code == 0
    logs = {log.topic_partition.partition: log for log in cluster.broker.partitions.all() if log.core.next_offset}
    logs[0].is_releasing = True
    logs[1].tail.clear()
    starts: list[int] = []

    def refuse(*arguments: Any) -> asyncio.Task[BatchRun]:
        starts.append(arguments[1])
        if isinstance(refusal, Overloaded):
            raise refusal
        return asyncio.get_running_loop().create_task(fail())

    async def fail() -> BatchRun:
        raise refusal

    monkeypatch.setattr(handler_of(cluster).pending_reads, "start", refuse)
    request = fetch_request("topic", 0, max_wait_ms=_WAIT_MS)
    (topic,) = request.topics
    (wanted,) = topic.partitions
    partitions = (wanted, replace(wanted, partition=1), replace(wanted, **elsewhere))
    body = memoryview(encode_entity(replace(request, topics=(replace(topic, partitions=partitions),))))
    assert fetch(cluster, connection, body) is not None
    async with asyncio.timeout(60):
        while not watchers_of(cluster) and len(starts) < 10:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
    assert starts == [0]
    assert watchers_of(cluster) >= 2
    logs[0].is_releasing = False
    logs[0].notify()
    await connection.over()
    assert b"first" in connection.answer
