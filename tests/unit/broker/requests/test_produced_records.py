"""Records are examined where a topic asks for it: keys, times, codec. Examining them beside the event loop changes no order."""

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
from support.hostile_batches import KINDS, hostile_batch
from unit.broker.handlers.test_round_trip import consume, create_topic, produce
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster, until_all_served, until_served
from unit.broker.raw_client import RawClient, fetch
from unit.broker.raw_client import produce as produce_raw

from stratalog_broker.requests.produce_checks import Refused
from stratalog_broker.requests.produced_records import (
    AT_ONCE_BYTES,
    Examined,
    Produced,
    ProducedRecords,
)
from stratalog_core.batches.batch import iterate_headers, read_header
from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Overloaded, StratalogError
from stratalog_core.search_pool import SearchPool
from stratalog_core.system import ThreadBackground
from stratalog_metadata.records import Topic, TopicPartition, topic_key
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs

pytestmark = pytest.mark.asyncio(loop_scope="module")
LARGE = AT_ONCE_BYTES + 1
COMPACTED: dict[str, Any] = {"cleanup.policy": "compact"}
ZSTD: dict[str, Any] = {"compression.type": "zstd"}


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
    assert await code_of(client, bytes(broken)) is ErrorCode.invalid_record
    assert await code_of(client, batch([b"b"])) is ErrorCode.none


@pytest.mark.parametrize("kind", KINDS)
async def test_what_compaction_could_not_read_is_refused_and_the_next_is_not(mini_cluster: MiniCluster, kind: str) -> None:
    client = await mini_cluster.connect()
    for codec in range(5):
        content = hostile_batch(kind, codec)
        too_large = len(content) > 2**20  # A bomb of snappy: it expands to 22 times its size at most.
        assert await code_of(client, content) is (ErrorCode.message_too_large if too_large else ErrorCode.invalid_record)
    assert await code_of(client, batch([b"b"])) is ErrorCode.none


async def test_an_idempotent_producer_with_a_full_pipeline_keeps_its_order(mini_cluster: MiniCluster) -> None:
    bootstrap = mini_cluster.bootstrap
    await in_thread(lambda: create_topic(bootstrap, "ordered", **COMPACTED))
    values = [b"%d" % number + b"x" * (300 if number % 50 else 40_000) for number in range(3000)]
    settings: dict[str, Any] = {"enable.idempotence": True, "compression.type": "zstd", "linger.ms": 0, "batch.size": 2_000}
    await in_thread(lambda: produce(bootstrap, "ordered", values, **settings))
    found = await in_thread(lambda: consume(bootstrap, "ordered", len(values), group="ordered"))
    assert [message.value() for message in found] == values


def produced(content: bytes | bytearray, configs: dict[str, str], *, has_room: bool = True) -> Produced:
    topic = Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=1, configs=configs)
    view = memoryview(bytearray(content))
    return Produced(view, read_header(view), TopicConfigs.of(topic, {}), 5_000, lambda _: has_room)


def keyed(*keys: bytes | None, codec: int = 0) -> Produced:
    return produced(batch(list(keys), codec=codec), COMPACTED)


async def test_batches_continue_in_the_order_of_their_arrival() -> None:
    background = ThreadBackground(2, "searches")
    records, partition = ProducedRecords(SearchPool(background, 1 << 20)), TopicPartition(UUID(int=1), 0)
    order = list[tuple[int, bool]]()
    finished = asyncio.Event()

    def noted(number: int, outcome: object) -> None:
        order.append((number, isinstance(outcome, Refused)))
        if len(order) == 20:
            finished.set()

    for number in range(20):
        keys: list[bytes | None] = [b"k"] * (5_000 if number % 2 == 0 else 1)
        records.start(partition, keyed(*keys, *([None] if number % 5 == 0 else []), codec=1), partial(noted, number))
    assert not records.check_at_once(partition, keyed(b"k"))
    await finished.wait()
    assert order == [(number, number % 5 == 0) for number in range(20)]
    assert records.check_at_once(partition, keyed(b"k"))
    await records.close()
    background.close()


async def examined(sent: Produced) -> Examined | Refused | StratalogError:
    """What becomes of a batch, checked at once if it can be."""
    background = ThreadBackground(1, "searches")
    records, partition = ProducedRecords(SearchPool(background, 1 << 22)), TopicPartition(UUID(int=1), 0)
    done: asyncio.Future[Examined | Refused | StratalogError] = asyncio.get_running_loop().create_future()
    try:
        if records.check_at_once(partition, sent):
            return Examined(sent.batch, sent.header)
        records.start(partition, sent, done.set_result)
        return await done
    except Refused as refused:
        return refused
    finally:
        await records.close()
        background.close()


@pytest.mark.parametrize("codec", [0, 4])
@pytest.mark.parametrize(
    ("times", "is_taken"), [([4_900, 4_100, 4_950], True), ([4_900, 3_900, 4_950], False), ([4_900, -1], True)]
)
async def test_each_records_time_is_checked_if_there_is_an_earliest_one(codec: int, times: list[int], is_taken: bool) -> None:
    written = [Record(offset=at, timestamp_ms=ms, key=None, value=b"v") for at, ms in enumerate(times)]
    content = build_batch(written, compression=codec)
    outcome = await examined(produced(content, {"message.timestamp.before.max.ms": "1000"}))
    assert isinstance(outcome, Examined) is is_taken
    if isinstance(outcome, Refused):
        assert outcome.code is ErrorCode.invalid_timestamp


async def test_a_batch_that_has_the_codec_is_stored_as_it_is() -> None:
    sent = produced(batch([b"k"], codec=4), {"compression.type": "zstd"})
    outcome = await examined(sent)
    assert isinstance(outcome, Examined)
    assert outcome.batch is sent.batch


async def test_a_rewritten_batch_is_bounded_by_the_topic_and_charged() -> None:
    content = batch([b"k"], value_bytes=200_000, codec=4)
    plain = {"compression.type": "uncompressed", "max.message.bytes": "100000"}
    too_large = await examined(produced(content, plain))
    assert isinstance(too_large, Refused)
    assert too_large.code is ErrorCode.message_too_large
    assert isinstance(await examined(produced(content, {"compression.type": "gzip"}, has_room=False)), Overloaded)
    broken = bytearray(content)
    broken[-3:] = b"xxx"
    malformed = await examined(produced(broken, {"compression.type": "gzip"}))
    assert isinstance(malformed, Refused)
    assert malformed.code is ErrorCode.invalid_record


@pytest.mark.parametrize("name", ["uncompressed", "zstd", "lz4"])
async def test_every_codec_becomes_the_topics_and_idempotence_holds(mini_cluster: MiniCluster, name: str) -> None:
    bootstrap, topic_name = mini_cluster.bootstrap, f"as-{name}"
    configs: dict[str, Any] = {"compression.type": name}
    await in_thread(lambda: create_topic(bootstrap, topic_name, **configs))
    values: list[bytes] = []
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        sent = [b"%s %d" % (codec.encode(), number) + b"x" * (100 if number % 20 else 30_000) for number in range(120)]
        options: dict[str, Any] = {"enable.idempotence": True, "compression.type": codec, "linger.ms": 0, "batch.size": 4_000}
        await in_thread(partial(produce, bootstrap, topic_name, sent, **options))
        values += sent
    found = await in_thread(lambda: consume(bootstrap, topic_name, len(values), group=topic_name))
    assert [message.value() for message in found] == values
    client = await mini_cluster.connect()
    answer = await fetch(client, topic_name, 0, max_bytes=50_000_000)
    headers = [header for _, header in iterate_headers(answer.records)]
    assert {header.compression for header in headers} == {NAMES.get(name, 0)}


async def test_a_retry_of_a_rewritten_batch_is_recognised(mini_cluster: MiniCluster) -> None:
    await in_thread(lambda: create_topic(mini_cluster.bootstrap, "retried", **ZSTD))
    await until_all_served(mini_cluster)
    client = await mini_cluster.connect()
    record = Record(offset=0, timestamp_ms=1, key=b"k", value=b"v")
    content = bytes(build_batch([record], producer_id=7, producer_epoch=0, base_sequence=0))
    answers = [await produce_raw(client, "retried", content) for _ in range(2)]
    assert [(ErrorCode(answer.error_code), answer.base_offset) for answer in answers] == [(ErrorCode.none, 0)] * 2
