"""A kind of coordinator that knows only the frame: counters by name, replicated in an internal topic of their own."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from support.replayed import replayed
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster
from unit.broker.raw_client import request

from stratalog_broker.coordination.coordinator_partition import (
    REPLAYED_AT_ONCE_BYTES,
    CoordinatorKind,
    CoordinatorPartition,
)
from stratalog_broker.coordination.locator import Coordinators
from stratalog_broker.coordination.record_writer import BATCH_BYTES_MAX, RecordWriter
from stratalog_broker.coordination.replay import ApplyRecord, CoordinatorRecord
from stratalog_broker.network.server import BrokerServer
from stratalog_broker.partitions.internal_topics import ApplicationFactory, InternalTopicApplication
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.batches.records import Header, Record, build_batch
from stratalog_core.errors import Corrupt, NotLeader
from stratalog_core.system import SystemClock
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import Topic, TopicPartition
from stratalog_metadata.state.commands import Command, Put

KEY_TYPE = 2
TOPIC = "__share_group_state"


class Counters:
    """The state: a snapshot has a line for each counter."""

    def __init__(self, snapshot: bytes | None) -> None:
        lines = (snapshot or b"").decode().splitlines()
        self.values = {name: int(value) for name, value in (line.split("=") for line in lines)}

    def begin_batch(self, producer_id: int = -1) -> ApplyRecord:
        return self._apply

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        raise AssertionError("no transaction has counters")

    def _apply(self, key: bytes, value: bytes | None, headers: Sequence[Header]) -> None:
        if value is None or not value.isdigit():
            raise Corrupt(f"{value!r} is no number")
        self.values[key.decode()] = int(value)

    def snapshot(self) -> bytes:
        return "\n".join(f"{name}={value}" for name, value in self.values.items()).encode()


class CounterApplication:
    def __init__(self, state: Counters, writer: RecordWriter, leader_epoch: int) -> None:
        self.state = state
        self.has_resigned = False
        self._writer = writer

    def resigned(self) -> None:
        self.has_resigned = True

    async def write(self, name: str, value: bytes) -> ErrorCode:
        return await self._writer.written([CoordinatorRecord(name.encode(), value)])


COUNTERS = CoordinatorKind(key_type=KEY_TYPE, topic=TOPIC, partition_count=2, copies=1, load=Counters, start=CounterApplication)


class CountingBrokers:
    """Adds counters to every broker of a cluster before it starts."""

    def __init__(self) -> None:
        self.coordinators: list[Coordinators[Counters, CounterApplication]] = []
        self.applications: set[CounterApplication] = set()

    def prepare(self, server: BrokerServer) -> None:
        self.coordinators.append(server.locator.add(COUNTERS))

    def refusal_of(self, number: int, name: str) -> ErrorCode:
        """Return the code with which a broker refuses requests for a name; NONE if it serves them."""
        try:
            self.coordinators[number].coordinator_of(name)
        except KafkaError as refused:
            return refused.code
        return ErrorCode.none

    async def serving(self, name: str) -> CounterApplication:
        """Return the newest broker's application for a name once it is loaded."""
        async with asyncio.timeout(WAIT_S):
            while self.refusal_of(-1, name) is not ErrorCode.none:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
        application = self.coordinators[-1].coordinator_of(name)
        self.applications.add(application)
        return application

    async def write(self, name: str, value: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            while await (await self.serving(name)).write(name, value) is not ErrorCode.none:
                pass

    async def values(self) -> dict[str, int]:
        return {name: value for key in "ab" for name, value in (await self.serving(key)).state.values.items()}


async def find(cluster: MiniCluster, key_type: int, *keys: str, version: int = 4) -> Any:
    client = await cluster.connect()
    answer = await client.call(
        10, version, request(10, version, "FindCoordinatorRequest", key_type=key_type, coordinator_keys=keys)
    )
    return answer.coordinators


async def owner_of(cluster: MiniCluster, name: str) -> int:
    """Find the name's coordinator as clients do: again, while it is not available."""
    async with asyncio.timeout(WAIT_S):
        while True:
            (found,) = await find(cluster, KEY_TYPE, name)
            if found.error_code is not ErrorCode.coordinator_not_available:
                assert (found.key, found.error_code) == (name, ErrorCode.none)
                return int(found.node_id)


async def test_a_second_kind_of_coordinator_needs_no_other_plumbing(tmp_path: Path) -> None:
    brokers = CountingBrokers()
    async with run_cluster(tmp_path, prepare=brokers.prepare) as cluster:
        assert brokers.refusal_of(0, "a") is ErrorCode.coordinator_not_available, "the topic does not exist yet"
        assert [await owner_of(cluster, name) for name in "abcd"] == [1] * 4
        for name in "abcd":
            await brokers.write(name, b"1")
        await brokers.write("a", b"7")
        await brokers.write("a", b"unreadable")
        assert await brokers.values() == {"a": 7, "b": 1, "c": 1, "d": 1}
        assert brokers.coordinators[0].unreadable_records

        old = cluster.brokers.pop(1)
        await cluster.start_broker(2, prepare=brokers.prepare)
        await old.stop()
        assert all(application.has_resigned for application in brokers.applications)
        assert not list(brokers.coordinators[0].loaded())
        assert await brokers.values() == {"a": 7, "b": 1, "c": 1, "d": 1}
        assert await owner_of(cluster, "a") == 2


async def test_another_brokers_partition_is_not_coordinated_here(tmp_path: Path) -> None:
    brokers = CountingBrokers()
    async with run_cluster(tmp_path, brokers=2, prepare=brokers.prepare) as cluster:
        elsewhere = 2 - await owner_of(cluster, "a")
        async with asyncio.timeout(WAIT_S):
            while brokers.refusal_of(elsewhere, "a") is not ErrorCode.not_coordinator:  # noqa: ASYNC110 - its view is behind
                await asyncio.sleep(0.01)


async def test_a_broker_without_a_session_sends_clients_to_other_brokers(tmp_path: Path) -> None:
    """It may not reach the metadata quorum, so that its view names it as the owner for as long as that lasts."""
    brokers = CountingBrokers()
    async with run_cluster(tmp_path, prepare=brokers.prepare) as cluster:
        await owner_of(cluster, "a")
        await brokers.write("a", b"1")
        cluster.broker.partitions.suspend()
        assert brokers.refusal_of(0, "a") is ErrorCode.not_coordinator
        (found,) = await find(cluster, KEY_TYPE, "a")
        assert found.error_code is ErrorCode.coordinator_not_available
        assert brokers.coordinators[0].is_loading, "a list of its groups would lack some"


@pytest.mark.parametrize("key_type", [2, 3, -1])
async def test_a_key_type_without_a_coordinator_is_refused(tmp_path: Path, key_type: int) -> None:
    async with run_cluster(tmp_path) as cluster:
        for version in (4, 6):
            found = await find(cluster, key_type, "a", "b", version=version)
            assert [(row.key, row.error_code, row.node_id) for row in found] == [
                (key, ErrorCode.invalid_request, -1) for key in ("a", "b")
            ]
            assert found[0].error_message == f"coordinators of key type {key_type} are not served; served: 0, 1"
        client = await cluster.connect()
        old = await client.call(10, 1, request(10, 1, "FindCoordinatorRequest", key_type=key_type, key="a"))
        assert (old.error_code, old.node_id) == (ErrorCode.invalid_request, -1)


async def test_every_key_of_a_request_is_answered(tmp_path: Path) -> None:
    keys = [f"group-{number}" for number in range(1_500)]
    async with run_cluster(tmp_path) as cluster:
        found = await find(cluster, 0, *keys)
        assert [row.key for row in found] == keys


async def test_a_partition_that_is_lost_keeps_no_state() -> None:
    async def append(batch: bytearray) -> int:
        raise AssertionError("nothing is written")

    partition = CoordinatorPartition(COUNTERS, append, SystemClock(), f"{TOPIC}-0")
    await partition.load(b"a=1", replayed(), 0)
    assert partition.application is not None
    state = weakref.ref(partition.application.state)
    partition.resigned()
    gc.collect()
    assert state() is None, "the locator keeps the partition, so that its memory would be used until the partition returns"


class LostLog:
    """The log of a partition that is lost once and taken over again by the same broker, in one turn of the event loop."""

    is_suspended = False

    def __init__(self) -> None:
        self.factory: ApplicationFactory | None = None
        self.owner: InternalTopicApplication | None = None
        self.batches: list[bytes] = []

    def register_application(self, topic: str, factory: ApplicationFactory) -> None:
        self.factory = factory

    def is_serving(self, topic_partition: TopicPartition) -> bool:
        return True

    async def take_over(self) -> None:
        assert self.factory is not None
        self.owner = self.factory(0)
        await self.owner.load(None, replayed(self.batches), 1)

    def append_internal(self, topic_partition: TopicPartition, batch: bytearray) -> Awaitable[int]:
        if self.owner is None:
            raise NotLeader
        self.batches.append(bytes(batch))
        self.owner.apply(batch)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        done.set_result(len(self.batches))
        return done


async def test_records_that_a_lost_coordinator_queued_are_not_written_for_the_next() -> None:
    """Each batch is appended in a turn of its own, and the broker may have taken the partition over again by then."""
    log, metadata = LostLog(), MemoryMetadata()
    topic = Topic(name=TOPIC, topic_id=UUID(int=1), partition_count=1, replication_factor=1)
    await metadata.propose(Command(updates=(Put(record=topic),)))
    coordinators = Coordinators(COUNTERS, 1, metadata.view, SystemClock(), log)
    await log.take_over()
    (lost,) = coordinators.loaded()
    writes = [asyncio.create_task(lost.write(str(number).zfill(BATCH_BYTES_MAX), b"1")) for number in range(3)]
    await asyncio.sleep(0)
    owner, log.owner = log.owner, None
    assert owner is not None
    owner.resigned()
    await asyncio.sleep(0)
    await log.take_over()
    assert await asyncio.gather(*writes) == [ErrorCode.not_coordinator] * 3
    assert not log.batches


async def test_a_long_log_is_replayed_in_short_turns_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session may end after three seconds; a log may take many to replay."""
    record = Record(offset=0, timestamp_ms=0, key=b"a", value=b"1" * 1000)
    log = [bytes(build_batch([record])) for _ in range(1000)]
    turns, replayed_bytes = 0, Counter[int]()
    loop = asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        next_turn[0] = loop.call_soon(turn)

    def batches() -> Iterator[bytes]:
        for batch in log:
            replayed_bytes[turns] += len(batch)
            yield batch

    async def append(batch: bytearray) -> int:
        raise AssertionError("nothing is written")

    next_turn = [loop.call_soon(turn)]
    partition = CoordinatorPartition(COUNTERS, append, SystemClock(), f"{TOPIC}-0")
    await partition.load(None, replayed(batches()), 0)
    next_turn[0].cancel()
    assert partition.application is not None
    assert partition.application.state.values == {"a": int("1" * 1000)}
    assert sum(replayed_bytes.values()) == sum(map(len, log))
    assert max(replayed_bytes.values()) <= REPLAYED_AT_ONCE_BYTES + 2 * len(log[0])
