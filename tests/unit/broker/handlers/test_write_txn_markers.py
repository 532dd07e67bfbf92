"""Markers end transactions in partitions, once the quorum has them; obsolete coordinators and producers are fenced."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, until_served
from unit.broker.partitions.test_failover import create_topic
from unit.broker.raw_client import RawClient, fetch, fetch_request, list_offset, request
from unit.broker.transactional import COMMITTED, append, mark, marker_request, partition_of, read_committed, transactional

from stratalog_broker.coordination.transactions import marker_sender
from stratalog_broker.handlers import write_txn_markers
from stratalog_core.partition_state.transactions import ABORT, COMMIT

TOPIC = "flights"


async def test_a_committed_transaction_becomes_readable_and_an_aborted_one_never(
    flights: MiniCluster, client: RawClient
) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a", b"b"))
    await append(flights, TOPIC, transactional(2, 0, b"x"))
    assert await read_committed(client, TOPIC) == []
    row = await fetch(client, TOPIC, 0)
    assert (row.high_watermark, row.last_stable_offset) == (3, 0), "readers of uncommitted records get it, too"
    assert await mark(client, TOPIC, 1, COMMIT) == 0
    assert await read_committed(client, TOPIC) == [b"a", b"b"]
    assert await mark(client, TOPIC, 2, ABORT) == 0
    await append(flights, TOPIC, transactional(2, 1, b"y"))
    assert await mark(client, TOPIC, 2, COMMIT) == 0
    assert await read_committed(client, TOPIC) == [b"a", b"b", b"y"]
    assert await read_committed(client, TOPIC, 1) == [b"b", b"y"]
    assert await read_committed(client, TOPIC, max_bytes=1) == [b"a", b"b", b"y"], "one batch at a time"
    row = await fetch(client, TOPIC, 2, isolation_level=COMMITTED)
    assert [(one.producer_id, one.first_offset) for one in row.aborted_transactions] == [(2, 2)]
    assert (await fetch(client, TOPIC, 0)).aborted_transactions is None


async def test_the_latest_offset_of_committed_records_is_the_last_stable_one(flights: MiniCluster, client: RawClient) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a"))
    await mark(client, TOPIC, 1, COMMIT)
    await append(flights, TOPIC, transactional(1, 1, b"b"))
    assert (await list_offset(client, TOPIC, -1, isolation_level=COMMITTED)).offset == 2
    assert (await list_offset(client, TOPIC, -1)).offset == 3
    assert (await list_offset(client, TOPIC, 1000, isolation_level=COMMITTED)).offset == 0
    await mark(client, TOPIC, 1, COMMIT)
    assert (await list_offset(client, TOPIC, -1, isolation_level=COMMITTED)).offset == 4


async def test_a_waiting_reader_is_answered_when_the_transaction_ends(flights: MiniCluster, client: RawClient) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a"))
    reader = await flights.connect()
    waiting = asyncio.ensure_future(
        reader.call(1, 11, fetch_request(TOPIC, 0, isolation_level=COMMITTED, max_wait_ms=3_600_000))
    )
    log = flights.broker.partitions.find(partition_of(flights, TOPIC))
    assert log is not None
    async with asyncio.timeout(WAIT_S):
        while not log.watchers:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
    await append(flights, TOPIC, transactional(1, 1, b"b"))
    assert log.watchers, "the high watermark has moved, the last stable offset has not"
    assert await mark(client, TOPIC, 1, COMMIT) == 0
    row = (await waiting).responses[0].partitions[0]
    assert (row.last_stable_offset, row.high_watermark) == (3, 3)


async def test_older_coordinators_and_producers_are_fenced(flights: MiniCluster, client: RawClient) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a", epoch=3))
    assert await mark(client, TOPIC, 1, COMMIT, epoch=2) is ErrorCode.invalid_producer_epoch
    assert await mark(client, TOPIC, 1, ABORT, epoch=4, coordinator_epoch=7) == 0, "a time-out raises the epoch"
    assert await mark(client, TOPIC, 1, COMMIT, epoch=4, coordinator_epoch=6) is ErrorCode.transaction_coordinator_fenced
    assert await mark(client, TOPIC, 1, ABORT, epoch=4, coordinator_epoch=7) == 0, "the first response was lost"
    assert await read_committed(client, TOPIC) == []


async def test_a_marker_of_version_2_must_raise_the_epoch_unless_it_is_repeated(
    flights: MiniCluster, client: RawClient
) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a", epoch=3))
    assert await mark(client, TOPIC, 1, COMMIT, epoch=3, version=2) is ErrorCode.invalid_producer_epoch
    assert await mark(client, TOPIC, 1, COMMIT, epoch=4, version=2) == 0
    assert await mark(client, TOPIC, 1, COMMIT, epoch=4, version=2) == 0
    await append(flights, TOPIC, transactional(1, 0, b"b", epoch=4))
    assert await mark(client, TOPIC, 1, COMMIT, epoch=4, version=2) is ErrorCode.invalid_producer_epoch, (
        "a late copy of the last transaction's marker does not end this one"
    )
    assert await read_committed(client, TOPIC) == [b"a"]


async def test_partitions_that_are_not_here_are_refused_one_by_one(flights: MiniCluster, client: RawClient) -> None:
    await append(flights, TOPIC, transactional(1, 0, b"a"))
    answer = await client.call(27, 1, marker_request(TOPIC, 1, COMMIT, partitions=(0, 99)))
    rows = answer.markers[0].topics[0].partitions
    assert [(row.partition_index, row.error_code) for row in rows] == [(0, 0), (99, ErrorCode.unknown_topic_or_partition)]
    assert await mark(client, "unknown", 1, COMMIT) is ErrorCode.unknown_topic_or_partition
    assert (await client.call(27, 1, request(27, 1, "WriteTxnMarkersRequest", markers=()))).markers == ()


async def test_a_marker_that_cannot_be_written_does_not_hide_the_outcome_of_others(
    flights: MiniCluster, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator would send all of them again, and give up waiting again, for as long as that partition is stuck."""
    monkeypatch.setattr(write_txn_markers, "ANSWER_WITHIN_S", 0.5)
    await in_thread(lambda: create_topic(flights, "stuck", 1))
    identity = partition_of(flights, "stuck")
    await until_served(flights.broker, identity.topic_id)
    stuck = flights.broker.partitions.find(identity)
    assert stuck is not None
    stuck.core.hold()
    markers = [marker_request(topic, 1, COMMIT).markers[0] for topic in ("stuck", TOPIC)]
    async with asyncio.timeout(marker_sender.TIMEOUT_S):
        answer = await client.call(27, 1, request(27, 1, "WriteTxnMarkersRequest", markers=tuple(markers)))
    codes = [marker.topics[0].partitions[0].error_code for marker in answer.markers]
    assert codes == [ErrorCode.request_timed_out, ErrorCode.none]
