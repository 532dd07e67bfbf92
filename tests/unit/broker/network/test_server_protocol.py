"""The broker's responses to valid and invalid requests on the wire."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster, until_served
from unit.broker.raw_client import (
    RawClient,
    batch,
    fetch,
    fetch_request,
    list_offset,
    produce,
    produce_request,
    request,
)

from stratalog_bookies.client import LedgerWriter
from stratalog_broker.admin.topics import NewTopic
from stratalog_broker.configs.memory import MemoryShares
from stratalog_broker.handlers import metadata
from stratalog_broker.partitions import quorum_admission as admission
from stratalog_broker.partitions.ledger_opening import LedgerOpening
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_core.batches.batch import TIMESTAMP_TYPE_BIT, check_batch, read_header
from stratalog_core.batches.records import Record, build_batch, iterate_records

MIB = 1024 * 1024
HOUR_S = 3600.0


async def create(cluster: MiniCluster, name: str, **configs: str) -> None:
    """Create a topic of one partition and wait until it is served."""
    topic = await cluster.broker.topic_commands.create(
        NewTopic(name=name, partition_count=1, replication_factor=1, configs=configs), WAIT_S
    )
    await until_served(cluster.broker, topic.topic_id)


pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mini_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MiniCluster]:
    """One cluster for all tests of this module; each uses topics of its own."""
    async with run_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def flights() -> str:
    """A topic name that no other test uses."""
    return f"flights-{next(_numbers)}"


@pytest_asyncio.fixture(loop_scope="module")
async def client(mini_cluster: MiniCluster) -> RawClient:
    return await mini_cluster.connect()


async def test_api_versions_answers_the_table_in_every_version(client: RawClient) -> None:
    for version in range(5):
        values = {} if version < 3 else {"client_software_name": "raw", "client_software_version": "1"}
        answer = await client.call(18, version, request(18, version, "ApiVersionsRequest", **values))
        ranges = {row.api_key: (row.min_version, row.max_version) for row in answer.api_keys}
        assert ranges[0] == (0, 13)
        assert ranges[1] == (4, 18)
        assert ranges[18] == (0, 4)


async def test_an_unknown_version_of_api_versions_is_answered_in_version_0(client: RawClient) -> None:
    client.send(18, 99, b"whatever", answer_version=0)
    answer = await client.receive()
    assert answer.error_code is ErrorCode.unsupported_version
    assert any(row.api_key == 18 for row in answer.api_keys)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">i", -5),
        struct.pack(">i", 0),
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", 3) + b"abc",
        struct.pack(">ihhih", 10, 3, 99, 1, -1),
        struct.pack(">ihhih", 10, 999, 0, 1, -1),
        struct.pack(">ihhih", 10, 0, 1, 1, -1),
        struct.pack(">ihhih", 30, 3, 1, 1, -1) + b"\x7f" * 20,
        struct.pack(">ihhih", 30, 0, 3, 1, -1) + b"\x7f" * 20,
        struct.pack(">ihhih", 30, 1, 4, 1, -1) + b"\x7f" * 20,
        struct.pack(">ihhih", 30, 1, 12, 1, 2000) + b"\x7f" * 20,
    ],
)
async def test_malformed_requests_close_only_their_own_connection(
    mini_cluster: MiniCluster, client: RawClient, frame: bytes
) -> None:
    client.send_bytes(frame)
    assert await client.closed()
    other = await mini_cluster.connect()
    await other.call(18, 0, request(18, 0, "ApiVersionsRequest"))
    await other.close()
    assert mini_cluster.broker.connections.bytes_held == 0


async def test_fetched_batches_equal_the_produced_ones(mini_cluster: MiniCluster, client: RawClient, flights: str) -> None:
    await create(mini_cluster, flights)
    sent = [batch(b"one", b"two"), batch(b"three")]
    offsets = [(await produce(client, flights, content)).base_offset for content in sent]
    assert offsets == [0, 2]
    found = await fetch(client, flights, 0)
    assert found.high_watermark == 3
    header = read_header(found.records)
    assert found.records[: header.size_bytes][17:] == sent[0][17:]
    second = read_header(found.records, header.size_bytes)
    assert (second.base_offset, second.leader_epoch) == (2, header.leader_epoch)
    assert (await fetch(client, flights, 1)).records == found.records, "the batch that holds the offset comes whole"


async def test_pipelined_requests_of_any_size_are_answered_in_order(
    mini_cluster: MiniCluster, client: RawClient, flights: str
) -> None:
    await create(mini_cluster, flights)
    sizes = [10, 70_000, 5, 900_000, 1, 30_000, 65_000]
    for size in sizes:
        client.send(0, 9, encode_entity(produce_request(flights, 0, batch(b"x" * size))))
    client.send(18, 0, b"")
    offsets = [(await client.receive()).responses[0].partition_responses[0].base_offset for _ in sizes]
    assert offsets == list(range(len(sizes)))
    assert (await client.receive()).error_code is ErrorCode.none


async def test_acks_0_gets_no_answer_and_acks_1_does(mini_cluster: MiniCluster, client: RawClient, flights: str) -> None:
    await create(mini_cluster, flights)
    client.send_bytes(b"")
    silent = encode_entity(produce_request(flights, 0, batch(b"silent"), acks=0))
    client.send(0, 9, silent)
    client._sent.clear()
    answer = await produce(client, flights, batch(b"heard"), acks=1)
    assert (answer.error_code, answer.base_offset) == (ErrorCode.none, 1)
    found = await fetch(client, flights, 0, max_wait_ms=2000, min_bytes=120)
    assert [record.value for record in iterate_records(found.records)] == [b"silent"]


BAD_BATCHES: dict[str, tuple[Callable[[bytes], bytes | None], ErrorCode]] = {
    "flipped": (lambda good: good[:70] + bytes([good[70] ^ 1]) + good[71:], ErrorCode.corrupt_message),
    "cut": (lambda good: good[:-1], ErrorCode.invalid_record),
    "short": (lambda good: good[:30], ErrorCode.invalid_record),
    "nothing": (lambda good: b"", ErrorCode.invalid_record),
    "negative length": (lambda good: good[:8] + b"\xff\xff\xff\xff" + good[12:], ErrorCode.corrupt_message),
    "small length": (lambda good: good[:8] + b"\x00\x00\x00\x14" + good[12:32], ErrorCode.corrupt_message),
    "unknown magic": (lambda good: good[:16] + b"\x03" + good[17:], ErrorCode.corrupt_message),
    "two": (lambda good: good + good, ErrorCode.invalid_record),
    "magic": (lambda good: good[:16] + b"\x01" + good[17:], ErrorCode.invalid_record),
    "missing": (lambda good: None, ErrorCode.invalid_record),
}


@pytest.mark.parametrize("name", list(BAD_BATCHES))
async def test_a_bad_batch_is_refused_and_takes_no_offset(
    mini_cluster: MiniCluster, client: RawClient, name: str, flights: str
) -> None:
    await create(mini_cluster, flights)
    spoil, code = BAD_BATCHES[name]
    answer = await produce(client, flights, spoil(batch(b"a value that is long enough")))
    assert answer.error_code is code
    assert (await produce(client, flights, batch(b"good"))).base_offset == 0


async def test_topic_limits_are_enforced(mini_cluster: MiniCluster, client: RawClient) -> None:
    await create(mini_cluster, "small", **{"max.message.bytes": "1000", "message.timestamp.before.max.ms": "1000000"})
    now_ms = mini_cluster.broker.clock.wall_ms()
    codes = [
        (await produce(client, "small", batch(b"x" * 2000, timestamp_ms=now_ms))).error_code,
        (await produce(client, "small", batch(b"x", timestamp_ms=now_ms + 7_200_000))).error_code,
        (await produce(client, "small", batch(b"x", timestamp_ms=now_ms - 7_200_000))).error_code,
        (await produce(client, "small", batch(b"x", timestamp_ms=now_ms), acks=7)).error_code,
        (await produce(client, "small", batch(b"x", timestamp_ms=now_ms))).error_code,
    ]
    assert [code.name for code in codes] == [
        "message_too_large", "invalid_timestamp", "invalid_timestamp", "invalid_required_acks", "none",
    ]  # fmt: skip


async def test_log_append_time_stamps_the_batch(mini_cluster: MiniCluster, client: RawClient) -> None:
    await create(mini_cluster, "stamped", **{"message.timestamp.type": "LogAppendTime"})
    before = mini_cluster.broker.clock.wall_ms()
    answer = await produce(client, "stamped", batch(b"a", b"b", timestamp_ms=5))
    found = await fetch(client, "stamped", 0)
    header = read_header(found.records)
    assert header.max_timestamp_ms >= before
    assert answer.log_append_time.timestamp() * 1000 == pytest.approx(header.max_timestamp_ms)
    assert {record.timestamp_ms for record in iterate_records(found.records)} == {header.max_timestamp_ms}


async def test_a_producer_cannot_say_that_its_times_are_the_brokers(mini_cluster: MiniCluster, client: RawClient) -> None:
    """As in Kafka. A batch that was fetched from a topic with LogAppendTime and is produced as it is made one time of all."""
    for name, configs in (("created", {}), ("appended", {"message.timestamp.type": "LogAppendTime"})):
        await create(mini_cluster, name, **configs)
        records = [Record(offset=at, timestamp_ms=1_000 + at, key=None, value=b"x") for at in range(2)]
        assert (await produce(client, name, bytes(build_batch(records, attributes=TIMESTAMP_TYPE_BIT)))).error_code == 0
    found = (await fetch(client, "created", 0)).records
    assert [record.timestamp_ms for record in iterate_records(found)] == [1_000, 1_001]
    assert not check_batch(found).is_log_append_time
    assert check_batch((await fetch(client, "appended", 0)).records).is_log_append_time


async def test_a_batch_that_overtook_a_refused_one_gets_a_retriable_error(
    mini_cluster: MiniCluster, client: RawClient, flights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after a takeover, a gap in a producer's sequence means that the preceding batch was refused and will be retried."""
    monkeypatch.setattr(admission, "SETTLING_S", HOUR_S)
    await create(mini_cluster, flights)

    async def send(base_sequence: int) -> tuple[str, int]:
        answer = await produce(client, flights, batch(b"a", producer_id=9, producer_epoch=0, base_sequence=base_sequence))
        return answer.error_code.name, answer.base_offset

    assert (await send(1))[0] == "not_leader_or_follower", "nothing is known of the producer: it must begin with its first"
    assert await send(0) == ("none", 0)
    assert (await send(2))[0] == "not_leader_or_follower"
    assert await send(1) == ("none", 1)
    assert await send(2) == ("none", 2)


async def test_a_retry_gets_the_offset_of_the_first_try(
    mini_cluster: MiniCluster, client: RawClient, flights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SETTLING_S", 0.0)
    await create(mini_cluster, flights)
    first = batch(b"a", b"b", producer_id=9, producer_epoch=0, base_sequence=0)
    entity = encode_entity(produce_request(flights, 0, first))
    client.send(0, 9, entity)
    client.send(0, 9, entity)
    answers = [(await client.receive()).responses[0].partition_responses[0] for _ in range(2)]
    assert [(answer.error_code.name, answer.base_offset) for answer in answers] == [("none", 0), ("none", 0)]
    gap = await produce(client, flights, batch(b"c", producer_id=9, producer_epoch=0, base_sequence=5))
    assert gap.error_code is ErrorCode.out_of_order_sequence_number
    newer = await produce(client, flights, batch(b"d", producer_id=9, producer_epoch=1, base_sequence=0))
    assert newer.base_offset == 2
    older = await produce(client, flights, batch(b"e", producer_id=9, producer_epoch=0, base_sequence=2))
    assert older.error_code is ErrorCode.invalid_producer_epoch


async def test_unknown_partitions_get_an_error(mini_cluster: MiniCluster, client: RawClient, flights: str) -> None:
    assert (await produce(client, "nowhere", batch(b"x"))).error_code is ErrorCode.unknown_topic_or_partition
    assert (await fetch(client, "nowhere", 0)).error_code is ErrorCode.unknown_topic_or_partition
    await create(mini_cluster, flights)
    assert (await fetch(client, flights, 0, partition=7)).error_code is ErrorCode.unknown_topic_or_partition
    assert (await fetch(client, flights, 99)).error_code is ErrorCode.offset_out_of_range
    assert (await fetch(client, flights, 0, leader_epoch=99)).error_code is ErrorCode.unknown_leader_epoch
    assert (await fetch(client, flights, 0, leader_epoch=0)).error_code is ErrorCode.fenced_leader_epoch


@pytest.mark.parametrize("is_in_tail", [True, False])
async def test_a_fetch_of_no_bytes_returns_one_batch(
    mini_cluster: MiniCluster, client: RawClient, flights: str, is_in_tail: bool
) -> None:
    """As in Kafka: a consumer with ``max.partition.fetch.bytes=0`` got nothing, permanently."""
    await create(mini_cluster, flights)
    for value in (b"first", b"second"):
        await produce(client, flights, batch(value))
    if not is_in_tail:
        log = mini_cluster.broker.partitions.find_by_name(flights.encode(), 0)
        assert log is not None
        log.tail.clear()
    sent = fetch_request(flights, 0, max_wait_ms=10_000, max_bytes=0)
    answer = await client.call(1, 11, replace(sent, max_bytes=MIB))
    records = answer.responses[0].partitions[0].records
    assert (read_header(records).next_offset, read_header(records).size_bytes) == (1, len(records))


@pytest.mark.parametrize("policy", ["delete", "compact"])
async def test_a_consumer_that_does_not_wait_gets_records_that_are_not_in_memory(
    mini_cluster: MiniCluster, client: RawClient, flights: str, policy: str
) -> None:
    """What is read of a compacted topic is not kept for the next fetch: each fetch began the read again, and was over first."""
    await create(mini_cluster, flights, **{"cleanup.policy": policy})
    record = Record(offset=0, timestamp_ms=1_000, key=b"key", value=b"value")
    assert (await produce(client, flights, bytes(build_batch([record])))).error_code == 0
    log = mini_cluster.broker.partitions.find_by_name(flights.encode(), 0)
    assert log is not None
    log.tail.clear()
    reads = mini_cluster.broker.pending_reads
    for _ in range(5):
        found = (await fetch(client, flights, 0, max_wait_ms=0)).records
        while any(reads.reads_in_progress):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.001)
        if found:
            break
    assert found


async def test_a_long_poll_ends_when_a_record_arrives(mini_cluster: MiniCluster, client: RawClient, flights: str) -> None:
    await create(mini_cluster, flights)
    # Longer than the client waits for a response: only the record can end the poll in time.
    waiting = asyncio.ensure_future(fetch(client, flights, 0, max_wait_ms=3_600_000))
    other = await mini_cluster.connect()
    await produce(other, flights, batch(b"news"))
    assert (await waiting).records
    assert (await fetch(client, flights, 1, max_wait_ms=50)).records == b""
    await other.close()


async def test_a_long_poll_counts_the_fetched_bytes_once(mini_cluster: MiniCluster, client: RawClient, flights: str) -> None:
    await create(mini_cluster, flights)
    waiting = asyncio.ensure_future(fetch(client, flights, 0, max_wait_ms=300, min_bytes=1_000_000))
    other = await mini_cluster.connect()
    for _ in range(3):
        await produce(other, flights, batch(b"news"))
    records = (await waiting).records
    log = mini_cluster.broker.partitions.find_by_name(flights.encode(), 0)
    assert log is not None
    assert log.bytes_out == len(records)
    await other.close()


async def test_a_fetch_session_returns_only_changed_partitions(
    mini_cluster: MiniCluster, client: RawClient, flights: str
) -> None:
    await create(mini_cluster, flights)
    await produce(client, flights, batch(b"one"))
    first = await client.call(1, 11, fetch_request(flights, 0, session=(0, 0)))
    assert first.session_id > 0
    nothing = await client.call(1, 11, fetch_request(flights, 1, session=(first.session_id, 1)))
    assert nothing.responses == ()
    await produce(client, flights, batch(b"two"))
    news = await client.call(1, 11, fetch_request(flights, -1, session=(first.session_id, 2)))
    assert [record.value for record in iterate_records(news.responses[0].partitions[0].records)] == [b"two"]
    stale = await client.call(1, 11, fetch_request(flights, 1, session=(first.session_id, 2)))
    assert stale.error_code is ErrorCode.invalid_fetch_session_epoch
    unknown = await client.call(1, 11, fetch_request(flights, 1, session=(first.session_id + 1, 2)))
    assert unknown.error_code is ErrorCode.fetch_session_id_not_found


async def test_a_fetch_session_repeats_an_error_until_it_is_gone(
    mini_cluster: MiniCluster, client: RawClient, flights: str
) -> None:
    """KIP-227: a client acts on each error; one that is told once would fetch nothing, at once, for ever."""
    await create(mini_cluster, flights)
    await produce(client, flights, batch(b"one"))
    first = await client.call(1, 11, fetch_request(flights, 3, session=(0, 0)))
    answers = [
        first,
        *[await client.call(1, 11, fetch_request(flights, -1, session=(first.session_id, one))) for one in (1, 2)],
    ]
    codes = [[row.error_code for topic in answer.responses for row in topic.partitions] for answer in answers]
    assert codes == [[ErrorCode.offset_out_of_range]] * 3
    await produce(client, flights, batch(b"two", b"three"))
    healed = await client.call(1, 11, fetch_request(flights, -1, session=(first.session_id, 3)))
    assert [row.error_code for row in healed.responses[0].partitions] == [ErrorCode.none]


async def test_offsets_by_name_and_by_time(mini_cluster: MiniCluster, client: RawClient, flights: str) -> None:
    await create(mini_cluster, flights)
    for start_ms in (5_000, 1_000, 9_000, 3_000):
        await produce(client, flights, batch(b"a", b"b", timestamp_ms=start_ms))
    expected = {
        -1: (8, -1), -2: (0, -1), -3: (5, 9_001), -4: (0, -1), -5: (-1, -1), -6: (0, -1),
        0: (0, 5_000), 5_001: (1, 5_001), 5_002: (4, 9_000), 9_001: (5, 9_001), 9_002: (-1, -1),
    }  # fmt: skip
    found = {}
    for timestamp in expected:
        answer = await list_offset(client, flights, timestamp)
        assert answer.error_code is ErrorCode.none
        found[timestamp] = (answer.offset, answer.timestamp)
    assert found == expected
    for timestamp, version in ((-6, 10), (-7, 11)):
        assert (await list_offset(client, flights, timestamp, version=version)).error_code is ErrorCode.unsupported_version


async def test_the_earliest_local_offset_is_not_beyond_records_that_wait_for_the_first_ledger(
    mini_cluster: MiniCluster, client: RawClient, flights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that began there skipped them."""
    await create(mini_cluster, flights)
    may_open, open_ledger = asyncio.Event(), LedgerOpening.open

    async def open_later(opening: LedgerOpening, *arguments: Any) -> LedgerWriter:
        await may_open.wait()
        return await open_ledger(opening, *arguments)

    monkeypatch.setattr(LedgerOpening, "open", open_later)
    other = await mini_cluster.connect()
    sending = asyncio.ensure_future(produce(other, flights, batch(b"first")))
    log = mini_cluster.broker.partitions.find_by_name(flights.encode(), 0)
    assert log is not None
    async with asyncio.timeout(WAIT_S):
        while not log.core.queue:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
    assert (await list_offset(client, flights, -4)).offset == 0
    may_open.set()
    assert (await sending).base_offset == 0
    await other.close()


async def test_the_maximum_timestamp_is_that_of_a_readable_record(
    mini_cluster: MiniCluster, client: RawClient, flights: str
) -> None:
    """The greatest timestamp is below the log's start, in a batch that continues above it."""
    await create(mini_cluster, flights)
    for start_ms in (9_000, 5_000, 1_000, 5_000):
        await produce(client, flights, batch(b"a", b"b", timestamp_ms=start_ms))
    for start, expected in ((1, (1, 9_001)), (2, (3, 5_001)), (4, (7, 5_001)), (8, (-1, -1))):
        log = mini_cluster.broker.partitions.find_by_name(flights.encode(), 0)
        assert log is not None
        log.core.move_start(start)
        answer = await list_offset(client, flights, -3)
        assert (answer.error_code, answer.offset, answer.timestamp) == (ErrorCode.none, *expected)


async def test_leader_epochs_end_where_the_next_began(mini_cluster: MiniCluster, client: RawClient, flights: str) -> None:
    await create(mini_cluster, flights)
    await produce(client, flights, batch(b"a", b"b"))
    log = mini_cluster.broker.partitions.find_by_name(flights.encode(), 0)
    assert log is not None
    wanted = request(23, 4, "OffsetForLeaderPartition", partition=0, leader_epoch=log.core.leader_epoch)
    topics = (request(23, 4, "OffsetForLeaderTopic", topic=flights, partitions=(wanted,)),)
    answer = await client.call(23, 4, request(23, 4, "OffsetForLeaderEpochRequest", replica_id=-1, topics=topics))
    (line,) = answer.topics[0].partitions
    assert (line.error_code, line.leader_epoch, line.end_offset) == (ErrorCode.none, log.core.leader_epoch, 2)


@pytest.mark.parametrize("version", [12, 17])
async def test_a_client_with_other_records_learns_where_they_diverge(
    mini_cluster: MiniCluster, client: RawClient, flights: str, version: int
) -> None:
    """KIP-595: the response has no records and comes at once, however long the client would wait."""
    await create(mini_cluster, flights)
    await produce(client, flights, batch(b"a", b"b"))
    log = mini_cluster.broker.partitions.find_by_name(flights.encode(), 0)
    assert log is not None
    epoch = log.core.leader_epoch
    key: dict[str, object] = {"topic": flights} if version == 12 else {"topic_id": log.topic.topic_id}

    async def answer_to(offset: int, last_epoch: int, session: tuple[int, int] = (0, -1)) -> Any:
        wanted = request(
            1, version, "FetchPartition",
            partition=0, fetch_offset=offset, last_fetched_epoch=last_epoch, current_leader_epoch=-1, partition_max_bytes=1000,
        )  # fmt: skip
        topic = request(1, version, "FetchTopic", **key, partitions=(wanted,))
        entity = request(
            1, version, "FetchRequest",
            max_wait=datetime.timedelta(seconds=10), min_bytes=10_000, max_bytes=1000, topics=(topic,),
            isolation_level=0, session_id=session[0], session_epoch=session[1], forgotten_topics_data=(), rack_id="",
        )  # fmt: skip
        return await client.call(1, version, entity)

    async def line_of(offset: int, last_epoch: int) -> Any:
        return (await answer_to(offset, last_epoch)).responses[0].partitions[0]

    for offset, last_epoch in ((5, epoch), (1, epoch - 1)):
        line = await line_of(offset, last_epoch)
        assert (line.error_code, line.records or b"") == (ErrorCode.none, b"")
        expected = (epoch, 2) if last_epoch == epoch else (last_epoch, 0)
        assert (line.diverging_epoch.epoch, line.diverging_epoch.end_offset) == expected
    assert (await line_of(1, epoch + 1)).error_code is ErrorCode.offset_out_of_range
    assert (await line_of(-1, epoch)).error_code is ErrorCode.offset_out_of_range
    session_id = (await answer_to(5, epoch, (0, 0))).session_id
    assert session_id > 0
    again = await answer_to(5, epoch, (session_id, 1))
    assert again.responses[0].partitions[0].diverging_epoch.end_offset == 2, "an incremental response repeats it"


async def test_producer_ids_are_never_reused(client: RawClient) -> None:
    ids = []
    for version in range(6):
        values = {"producer_id": -1, "producer_epoch": -1} if version >= 3 else {}
        asked = request(
            22,
            version,
            "InitProducerIdRequest",
            transactional_id=None,
            transaction_timeout=datetime.timedelta(0),
            **values,
        )
        answer = await client.call(22, version, asked)
        assert answer.error_code is ErrorCode.none
        ids.append(answer.producer_id)
    assert len(set(ids)) == len(ids)


async def test_request_memory_is_bounded_and_all_requests_complete(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, memory_bytes=8 * MIB) as cluster:
        await create(cluster, "flights")
        clients = [await cluster.connect() for _ in range(8)]
        body = encode_entity(produce_request("flights", 0, batch(b"x" * 700_000)))
        for each in clients:
            each.send(0, 9, body)
            each.send(0, 9, body)
        for each in clients:
            for _ in range(2):
                answer = (await each.receive()).responses[0].partition_responses[0]
                assert answer.error_code is ErrorCode.none
                assert (
                    cluster.broker.connections.bytes_held
                    <= MemoryShares.of(cluster.broker.settings.memory_bytes).requests
                    < 2 * MIB
                )
            await each.close()
        await produce(again := await cluster.connect(), "flights", batch(b"y"))
        await again.close()


async def test_metadata_in_every_version_creates_requested_topics(
    mini_cluster: MiniCluster, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "_CREATE_TIMEOUT_S", WAIT_S)
    for version in range(14):
        name = f"topic-{version}"
        extra = {"topic_id": None} if version >= 10 else {}
        values: dict[str, bool] = {}
        if version >= 4:
            values["allow_auto_topic_creation"] = True
        if version >= 8:
            values["include_topic_authorized_operations"] = False
        if 8 <= version <= 10:
            values["include_cluster_authorized_operations"] = False
        topics = (request(3, version, "MetadataRequestTopic", name=name, **extra),)
        answer = await client.call(3, version, request(3, version, "MetadataRequest", topics=topics, **values))
        (topic,) = answer.topics
        assert (topic.error_code, topic.name) == (ErrorCode.none, name)
        assert [partition.leader_id for partition in topic.partitions] == [1]
        assert len(answer.brokers) == 1
