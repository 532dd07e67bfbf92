"""The server of an archive over a directory, as Kafka clients see it: offsets, records, groups, refusals, more history."""

from __future__ import annotations

import asyncio
import datetime
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from kio.schema.errors import ErrorCode
from support.filled_archive import RECORDS, fill, segment_batch
from unit.broker.raw_client import RawClient, batch, fetch, list_offset, produce, request
from unit.tiering.conftest import FaultyStore

from stratalog.roles import archive
from stratalog.roles.runtime import Configuration, Node
from stratalog.target import existing_store
from stratalog_core.batches.batch import iterate_headers
from stratalog_core.errors import Conflict, Invalid, NotFound, Refused
from stratalog_core.files.directory_lock import lock_file
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import ObjectStore, open_store

WAIT_S = 60.0
GROUP = "readers"


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    background = ThreadBackground(4, "store")
    opened = open_store(str(tmp_path / "store"), background=background, clock=SystemClock(), random=Random())
    yield opened
    await opened.close()
    background.close()


def test_a_store_must_exist_and_keeps_its_options(tmp_path: Path) -> None:
    assert existing_store(f"{tmp_path}?keys=/etc/keys") == f"{tmp_path}?keys=/etc/keys"
    assert existing_store(str(tmp_path)) == str(tmp_path)
    assert existing_store("s3://bucket/prefix?keys=/etc/keys") == "s3://bucket/prefix?keys=/etc/keys"
    with pytest.raises(NotFound, match="missing is not a directory"):
        existing_store(f"{tmp_path / 'missing'}?keys=/etc/keys")


class CountingNode(Node):
    """A process whose requests to the store are counted."""

    counted: FaultyStore

    def store(self) -> ObjectStore:
        self.counted = FaultyStore(super().store())
        return self.counted


@asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[tuple[RawClient, CountingNode]]:
    """Serve the archive in ``directory``; yield a client."""
    overrides = archive.archive_overrides(store=str(directory / "store"), listen="127.0.0.1:0")
    async with AsyncExitStack() as stack:
        node = CountingNode(Configuration(file=None, overrides=overrides), stack)
        options = {"follow_s": 0.0, "with_deleted": False, **options}
        address = await archive.start(node, positions=directory / "positions", **options)
        client = await RawClient.connect(address)
        stack.push_async_callback(client.close)
        yield client, node


async def read_all(client: RawClient, topic: str, partition: int, end_offset: int) -> bytes:
    """Return all batches of a partition as they came."""
    content, offset = b"", 0
    async with asyncio.timeout(WAIT_S):
        while offset < end_offset:
            found = await fetch(client, topic, offset, partition=partition, max_wait_ms=500)
            assert found.error_code is ErrorCode.none
            assert found.high_watermark == end_offset
            content += found.records or b""
            headers = [header for _, header in iterate_headers(found.records or b"")]
            offset = headers[-1].next_offset if headers else offset
    return content


async def commit(client: RawClient, topic: str, offset: int) -> ErrorCode:
    partition = request(8, 7, "OffsetCommitRequestPartition", partition_index=0, committed_offset=offset, committed_metadata="")
    named = request(8, 7, "OffsetCommitRequestTopic", name=topic, partitions=(partition,))
    answer = await client.call(8, 7, request(8, 7, "OffsetCommitRequest", group_id=GROUP, member_id="", topics=(named,)))
    code: ErrorCode = answer.topics[0].partitions[0].error_code
    return code


async def position(client: RawClient, topic: str) -> int:
    named = request(9, 5, "OffsetFetchRequestTopic", name=topic, partition_indexes=(0,))
    answer = await client.call(9, 5, request(9, 5, "OffsetFetchRequest", group_id=GROUP, topics=(named,)))
    offset: int = answer.topics[0].partitions[0].committed_offset
    return offset


async def test_the_history_is_served_byte_for_byte(tmp_path: Path, store: ObjectStore) -> None:
    await fill(store, "flights", partitions=2, segments=3)
    async with served(tmp_path) as (client, _):
        for partition in (0, 1):
            stored = b"".join(segment_batch("flights", partition, number * RECORDS) for number in range(3))
            assert await read_all(client, "flights", partition, 3 * RECORDS) == stored
        named = {wanted: (await list_offset(client, "flights", wanted)).offset for wanted in (-1, -2, -3, 0, 1000 + 15, 9999)}
        assert named == {-1: 30, -2: 0, -3: 29, 0: 0, 1000 + 15: 15, 9999: -1}
        at_end = await fetch(client, "flights", 30, max_wait_ms=10)
        assert (at_end.error_code, at_end.records) == (ErrorCode.none, b"")
        beyond = await fetch(client, "flights", 31, max_wait_ms=10)
        assert beyond.error_code is ErrorCode.offset_out_of_range


async def test_positions_survive_a_restart_and_have_one_user(tmp_path: Path, store: ObjectStore) -> None:
    await fill(store, "flights", segments=3)
    async with served(tmp_path) as (client, _):
        assert await position(client, "flights") == -1
        assert await commit(client, "flights", 17) is ErrorCode.none
        with pytest.raises(Conflict, match=r"positions is in use by pid \d+ .* give this one a file of its own"):
            lock_file(tmp_path / "positions")
    async with served(tmp_path) as (client, _):
        assert await position(client, "flights") == 17
    (tmp_path / "positions").write_text("something else")
    with pytest.raises(Invalid, match="positions is not a positions file: give --positions another path"):
        async with served(tmp_path):
            pass


async def test_groups_of_the_consumer_protocol_read_history(tmp_path: Path, store: ObjectStore) -> None:
    await fill(store, "flights", partitions=2)

    async def heartbeat(client: RawClient, epoch: int, **fields: Any) -> Any:
        named = {"group_id": GROUP, "member_id": "me", "member_epoch": epoch}
        return await client.call(68, 1, request(68, 1, "ConsumerGroupHeartbeatRequest", **named, **fields))

    async with served(tmp_path) as (client, _):
        wait = datetime.timedelta(seconds=10)
        subscription = {"subscribed_topic_names": ("flights",), "topic_partitions": (), "rebalance_timeout": wait}
        joined = await heartbeat(client, 0, **subscription)
        assert joined.error_code is ErrorCode.none, joined.error_message
        assert [topic.partitions for topic in joined.assignment.topic_partitions] == [(0, 1)]
    async with served(tmp_path) as (client, _):
        again = await heartbeat(client, joined.member_epoch, topic_partitions=None, subscribed_topic_names=None)
        assert (again.error_code, again.member_epoch) == (ErrorCode.none, joined.member_epoch)


async def test_requests_that_change_topics_or_records_are_refused(tmp_path: Path, store: ObjectStore) -> None:
    await fill(store, "flights")
    async with served(tmp_path) as (client, _):
        answer = await client.call(
            18, 3, request(18, 3, "ApiVersionsRequest", client_software_name="t", client_software_version="1")
        )
        listed = {each.api_key for each in answer.api_keys}
        assert listed == {*range(4), *range(8, 17), 18, 23, 32, 35, 42, 46, 47, 60, 61, 68, 69, 71, 72, 74, 75}
        refused = await produce(client, "flights", batch(b"value"))
        assert refused.error_code is ErrorCode.policy_violation
        assert refused.error_message == "this is a read-only archive: produce to the cluster"
        assert (await list_offset(client, "flights", -1)).offset == RECORDS
        topic = request(3, 4, "MetadataRequestTopic", name="new")
        asked = request(3, 4, "MetadataRequest", topics=(topic,), allow_auto_topic_creation=True)
        unknown = await client.call(3, 4, asked)
        assert unknown.topics[0].error_code is ErrorCode.unknown_topic_or_partition
        client.send_bytes(bytes.fromhex("0000000a 0013 0002 00000001 ffff"))  # CreateTopics
        assert await client.closed()


async def test_a_follower_serves_what_is_added(tmp_path: Path, store: ObjectStore) -> None:
    filled = await fill(store, "flights")
    async with served(tmp_path, follow_s=0.05) as (client, _):
        assert (await list_offset(client, "flights", -1)).offset == RECORDS
        await filled.append(0, leader_epoch=4)
        async with asyncio.timeout(WAIT_S):
            while (await list_offset(client, "flights", -1)).offset != 2 * RECORDS:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.02)
        stored = segment_batch("flights", 0, 0) + segment_batch("flights", 0, RECORDS, leader_epoch=4)
        assert await read_all(client, "flights", 0, 2 * RECORDS) == stored


async def test_the_start_reads_nothing_of_most_segments(tmp_path: Path, store: ObjectStore) -> None:
    partitions, segments = 10, 20
    await fill(store, "flights", partitions, segments)
    async with served(tmp_path) as (_, node):
        requests = Counter(name for name, _ in node.counted.calls)
        footers = {key for name, key in node.counted.calls if key.endswith(".segment")}
        assert len(footers) == partitions, "the last one of each partition"
        assert sum(requests.values()) <= 3 + 6 * partitions


def leases(directory: Path) -> list[str]:
    return [path.name for path in (directory / "store").glob("leases/*.json")]


async def test_what_is_served_is_under_a_lease_that_ends_with_the_server(tmp_path: Path, store: ObjectStore) -> None:
    await fill(store, "flights")
    async with served(tmp_path):
        assert len(leases(tmp_path)) == 1
    assert leases(tmp_path) == []
    async with served(tmp_path, leased=False):
        assert leases(tmp_path) == []


async def test_a_look_for_more_history_begins_another_lease(tmp_path: Path, store: ObjectStore) -> None:
    await fill(store, "flights")
    async with served(tmp_path, follow_s=0.05), asyncio.timeout(WAIT_S):
        first = leases(tmp_path)
        while first[0] in leases(tmp_path):  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)
        assert len(leases(tmp_path)) in (1, 2)


async def test_an_archive_that_cannot_be_written_to_is_served_without_a_lease(
    tmp_path: Path, store: ObjectStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, "flights")

    async def refuse(*_: Any, **__: Any) -> None:
        raise Refused("access denied")

    monkeypatch.setattr(FaultyStore, "put", refuse)
    async with served(tmp_path) as (client, _):
        assert await position(client, "flights") == -1
    assert "serving without a lease" in caplog.text
