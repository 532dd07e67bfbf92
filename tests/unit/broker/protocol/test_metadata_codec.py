"""Metadata responses with hand-encoded partitions against kio; partitions stay encoded until they change."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from unit.broker.hand_fed_view import HandFedView

from stratalog_broker.cluster.partition_rows import PIECE_ROWS, ROWS_MAX, TOPIC_ROWS, PartitionRows, Pieces
from stratalog_broker.protocol.entities import encode_response as kio_encode
from stratalog_broker.protocol.entities import response_factory
from stratalog_broker.protocol.metadata import PartitionState, encode_metadata, encode_partition, encode_topic, layout_of
from stratalog_broker.requests.encoded_array import EncodedArray
from stratalog_metadata.records import Broker, Partition, Record, Topic

VERSIONS = range(14)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
ids = st.integers(0, 2**31 - 1)
nodes = st.lists(ids, max_size=15).map(tuple)
states = st.builds(PartitionState, st.just(-1) | ids, st.just(-1) | ids, nodes, nodes, nodes)
partitions = st.lists(states, max_size=140)


def kio_response(version: int, topics: list[tuple[str, list[PartitionState]]], *, empty: bool) -> tuple[Any, list[Any]]:
    new = response_factory(3, version)
    rows = [
        new(
            "MetadataResponseTopic", error_code=ErrorCode.none, name=name, topic_id=UUID(int=position + 1), is_internal=False,
            partitions=() if empty else tuple(kio_partition(version, index, one) for index, one in enumerate(of_topic)),
        )
        for position, (name, of_topic) in enumerate(topics)
    ]  # fmt: skip
    brokers = (new("MetadataResponseBroker", node_id=1, host="h", port=9092, rack=None),)
    response = new(
        "MetadataResponse", brokers=brokers, cluster_id="c", controller_id=1, topics=() if empty else tuple(rows),
        error_code=ErrorCode.none,
    )  # fmt: skip
    return response, rows


def kio_partition(version: int, index: int, state: PartitionState) -> Any:
    return response_factory(3, version)(
        "MetadataResponsePartition",
        error_code=ErrorCode.leader_not_available if state.leader < 0 else ErrorCode.none,
        partition_index=index, leader_id=state.leader, leader_epoch=state.leader_epoch, replica_nodes=state.replicas,
        isr_nodes=state.in_sync, offline_replicas=state.offline,
    )  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@given(topics=st.lists(st.tuples(names, partitions), max_size=4))
@settings(max_examples=15, deadline=None)
def test_the_bytes_are_kios(version: int, topics: list[tuple[str, list[PartitionState]]]) -> None:
    expected, _ = kio_response(version, topics, empty=False)
    response, rows = kio_response(version, topics, empty=True)
    layout = layout_of(version)
    encoded = [
        encode_topic(row, version, len(of_topic), [encode_partition(layout, i, one) for i, one in enumerate(of_topic)])
        for row, (_, of_topic) in zip(rows, topics, strict=True)
    ]
    assert encode_metadata(response, version, len(encoded), [b"".join(encoded)]) == kio_encode(expected)


class Cluster:
    """A view, fed by hand."""

    def __init__(self) -> None:
        self.view = HandFedView()
        self.rows = PartitionRows(self.view)

    def of(self, wanted: Topic, version: int) -> bytes:
        rows = asyncio.run(self.rows.of(wanted, version, Pieces()))
        assert rows.partitions == wanted.partition_count
        return b"".join(rows.blocks)

    def put(self, *records: Record) -> None:
        self.view.put(*records)

    def remove(self, *records: Record) -> None:
        self.view.remove(*(record.key() for record in records))


def broker(number: int) -> Broker:
    return Broker(broker_id=number, host="h", port=9092, session_id=number)


def topic(number: int, count: int) -> Topic:
    return Topic(name=f"t{number}", topic_id=UUID(int=number), partition_count=count, replication_factor=1)


def owned(number: int, index: int, owner: int, epoch: int = 1) -> Partition:
    return Partition(topic_id=UUID(int=number), index=index, owner=owner, leader_epoch=epoch)


def row(layout: int, index: int, owner: int, epoch: int, *, lives: bool = True) -> bytes:
    """A partition of one copy."""
    nodes = (owner,) if owner >= 0 else ()
    state = PartitionState(owner, epoch, nodes, nodes) if lives else PartitionState(-1, epoch, nodes, (), nodes)
    return encode_partition(layout, index, state)


def test_ten_thousand_partitions_are_encoded_once_and_then_only_those_that_change() -> None:
    cluster, big = Cluster(), topic(1, 10_000)
    cluster.put(broker(1), broker(2), big, *(owned(1, index, 1 + index % 2) for index in range(10_000)))
    first = cluster.of(big, 13)
    assert cluster.rows.encoded == 10_000
    assert all(cluster.of(big, version) == first for version in (9, 12, 13) * 300)
    assert cluster.rows.encoded == 10_000
    cluster.put(owned(1, 7, 2, epoch=5))
    size = len(first) // 10_000
    assert cluster.of(big, 13)[7 * size : 8 * size] == row(layout_of(13), 7, 2, 5)
    assert cluster.rows.encoded == 10_001


def test_partitions_of_a_broker_that_goes_have_no_leader_until_they_are_given_another() -> None:
    cluster, small = Cluster(), topic(1, 2)
    cluster.put(broker(1), broker(2), small, owned(1, 0, 1), owned(1, 1, 2))
    cluster.of(small, 13)
    cluster.remove(broker(1))
    layout = layout_of(13)
    assert cluster.of(small, 13) == row(layout, 0, 1, 1, lives=False) + row(layout, 1, 2, 1)
    cluster.put(owned(1, 0, 2, epoch=2))
    assert cluster.of(small, 13) == row(layout, 0, 2, 2) + row(layout, 1, 2, 1)


def test_a_topic_that_grows_or_comes_again_is_told_as_it_is() -> None:
    cluster = Cluster()
    cluster.put(broker(1), topic(1, 1), owned(1, 0, 1))
    assert cluster.of(topic(1, 1), 0) == row(0, 0, 1, 1)
    cluster.put(topic(1, 2), owned(1, 1, 1))
    assert cluster.of(topic(1, 2), 0) == row(0, 0, 1, 1) + row(0, 1, 1, 1)
    cluster.remove(topic(1, 2), owned(1, 0, 1), owned(1, 1, 1))
    cluster.put(topic(2, 1))
    assert cluster.of(topic(2, 1), 0) == row(0, 0, -1, -1)


def test_what_is_kept_is_bounded() -> None:
    cluster = Cluster()
    for number in range(1, 41):
        cluster.of(topic(number, ROWS_MAX // 20), 13)
        assert sum(len(found.rows) for found in cluster.rows._topics.values()) == cluster.rows._count <= ROWS_MAX
    assert len(cluster.rows._topics) == 20
    assert len(cluster.rows._layouts) == 20


# -- in pieces


async def test_the_event_loop_runs_after_every_piece_of_a_hundred_thousand_partitions() -> None:
    cluster, big = Cluster(), topic(1, 100_000)
    cluster.put(broker(1), big, *(owned(1, index, 1) for index in range(100_000)))
    pieces, turns = Pieces(), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    rows = await cluster.rows.of(big, 13, pieces)
    counting.cancel()
    assert rows.partitions == cluster.rows.encoded == 100_000
    assert pieces.largest == PIECE_ROWS
    assert turns >= 100_000 // PIECE_ROWS


async def test_what_changes_between_two_pieces_is_encoded_again() -> None:
    count = 3 * PIECE_ROWS
    cluster, big, grown = Cluster(), topic(1, count), topic(1, count + 1)
    cluster.put(broker(1), broker(2), big, *(owned(1, index, 1) for index in range(count)))
    first = asyncio.create_task(cluster.rows.of(big, 13, Pieces()))
    second = asyncio.create_task(cluster.rows.of(big, 13, Pieces()))
    await asyncio.sleep(0)
    assert cluster.rows.encoded == PIECE_ROWS, "one response encodes, the other one waits"
    cluster.put(*(owned(1, index, 2, epoch=5) for index in range(PIECE_ROWS)))
    cluster.put(grown, owned(1, count, 1))
    third = asyncio.create_task(cluster.rows.of(grown, 13, Pieces()))
    found = await asyncio.gather(first, second, third)
    layout = layout_of(13)
    expected = [row(layout, index, 2, 5) if index < PIECE_ROWS else row(layout, index, 1, 1) for index in range(count + 1)]
    assert {each.partitions for each in found} == {len(expected)}
    assert {b"".join(each.blocks) for each in found} == {b"".join(expected)}
    assert cluster.rows.encoded == len(expected) + PIECE_ROWS


async def test_topics_without_changes_are_added_in_pieces_too() -> None:
    topics = EncodedArray(TOPIC_ROWS)
    for number in range(20_000):
        await topics.add(number.to_bytes(2, "big"))
    joined = topics.join()
    assert topics.count == 20_000
    assert b"".join(joined) == b"".join(number.to_bytes(2, "big") for number in range(20_000))
    assert len(joined) < 1_000
    assert topics.pieces.largest == PIECE_ROWS
