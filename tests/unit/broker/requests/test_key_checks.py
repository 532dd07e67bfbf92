"""Records produced to a compacted topic need keys; checking them beside the event loop changes no order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from crc32c import crc32c
from kio.schema.errors import ErrorCode
from unit.broker.handlers.test_round_trip import consume, create_topic, produce
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_served
from unit.broker.raw_client import RawClient
from unit.broker.raw_client import produce as produce_raw

from stratalog_broker.requests.key_checks import AT_ONCE_BYTES, KeyChecks
from stratalog_broker.requests.produce_checks import Refused
from stratalog_core.batches.batch import read_header
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.search_pool import SearchPool
from stratalog_core.system import ThreadBackground
from stratalog_metadata.records import Topic, TopicPartition, topic_key

pytestmark = pytest.mark.asyncio(loop_scope="module")
LARGE = AT_ONCE_BYTES + 1
COMPACTED: dict[str, Any] = {"cleanup.policy": "compact"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mini_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MiniCluster]:
    async with run_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        await in_thread(lambda: create_topic(cluster.bootstrap, "compacted", **COMPACTED))
        topic = cluster.metadata.view.find(Topic, topic_key("compacted"))
        assert topic is not None
        await until_served(cluster.broker, topic.topic_id)
        yield cluster


def batch(keys: list[bytes | None], value_bytes: int = 1, codec: int = 0) -> bytes:
    records = [Record(offset=at, timestamp_ms=1_000, key=key, value=b"v" * value_bytes) for at, key in enumerate(keys)]
    return bytes(build_batch(records, compression=codec))


async def code_of(client: RawClient, content: bytes) -> ErrorCode:
    return ErrorCode((await produce_raw(client, "compacted", content)).error_code)


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("value_bytes", [1, LARGE])
async def test_a_record_without_a_key_is_refused(mini_cluster: MiniCluster, codec: int, value_bytes: int) -> None:
    client = await mini_cluster.connect()
    assert await code_of(client, batch([b"a", b""], value_bytes, codec)) is ErrorCode.none
    assert await code_of(client, batch([b"a", None], value_bytes, codec)) is ErrorCode.invalid_record
    assert await code_of(client, batch([b"b"], value_bytes, codec)) is ErrorCode.none


async def test_records_that_do_not_decompress_are_refused_and_the_next_are_not(mini_cluster: MiniCluster) -> None:
    client = await mini_cluster.connect()
    broken = bytearray(batch([b"a"]))
    broken[22] |= 4  # zstd, which these bytes are not
    broken[17:21] = crc32c(bytes(broken[21:])).to_bytes(4, "big")
    assert await code_of(client, bytes(broken)) is ErrorCode.corrupt_message
    assert await code_of(client, batch([b"b"])) is ErrorCode.none


async def test_an_idempotent_producer_with_a_full_pipeline_keeps_its_order(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap
    await in_thread(lambda: create_topic(bootstrap, "ordered", **COMPACTED))
    values = [b"%d" % number + b"x" * (300 if number % 50 else 40_000) for number in range(3000)]
    settings: dict[str, Any] = {"enable.idempotence": True, "compression.type": "zstd", "linger.ms": 0, "batch.size": 2_000}
    await in_thread(lambda: produce(bootstrap, "ordered", values, **settings))
    found = await in_thread(lambda: consume(bootstrap, "ordered", len(values), group="ordered"))
    assert [message.value() for message in found] == values


async def test_batches_continue_in_the_order_of_their_arrival() -> None:
    background = ThreadBackground(2, "searches")
    checks, partition = KeyChecks(SearchPool(background, 1 << 20)), TopicPartition(UUID(int=1), 0)
    order = list[tuple[int, bool]]()
    finished = asyncio.Event()

    def noted(number: int, failure: object) -> None:
        order.append((number, isinstance(failure, Refused)))
        if len(order) == 20:
            finished.set()

    for number in range(20):
        keys: list[bytes | None] = [b"k"] * (5_000 if number % 2 == 0 else 1)
        content = batch([*keys, None] if number % 5 == 0 else keys, codec=1)
        checks.start(partition, memoryview(content), read_header(content), partial(noted, number))
    assert not checks.check_at_once(partition, memoryview(batch([b"k"])), read_header(batch([b"k"])))
    await finished.wait()
    assert order == [(number, number % 5 == 0) for number in range(20)]
    assert checks.check_at_once(partition, memoryview(batch([b"k"])), read_header(batch([b"k"])))
    await checks.close()
    background.close()
