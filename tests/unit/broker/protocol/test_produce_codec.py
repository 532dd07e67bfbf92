"""The hand-written Produce codec against kio, which was made from Kafka's own message definitions."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from stratalog_broker.protocol.entities import encode_response as kio_encode
from stratalog_broker.protocol.entities import response_factory
from stratalog_broker.protocol.produce import (
    FLEXIBLE_VERSION,
    LEADER_VERSION,
    TOPIC_ID_VERSION,
    Leader,
    PartitionResult,
    encode_response,
    parse_request,
)
from stratalog_core.errors import Corrupt

versions = st.integers(3, 13)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
int16, int32, int64 = (st.integers(-(2**bits), 2**bits - 1) for bits in (15, 31, 63))
partition_data = st.lists(st.tuples(int32, st.none() | st.binary(max_size=300)), max_size=4)
# kio keeps times as datetimes, so only those that it can represent are compared.
times_ms = st.just(-1) | st.integers(0, 4_000_000_000_000)


def request_bytes(version: int, transactional_id: str | None, acks: int, timeout_ms: int, topics: list[Any]) -> bytes:
    module: Any = load_payload_module(0, version, EntityType.request)
    by_id = version >= TOPIC_ID_VERSION
    entity = module.ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout=datetime.timedelta(milliseconds=timeout_ms),
        topic_data=tuple(
            module.TopicProduceData(
                **({"topic_id": UUID(bytes=key)} if by_id else {"name": key.decode()}),
                partition_data=tuple(module.PartitionProduceData(index=index, records=data) for index, data in partitions),
            )
            for key, partitions in topics
        ),
    )
    return kio_encode(entity)


@given(st.data(), versions)
@settings(deadline=None)
def test_requests_are_taken_apart_as_kio_put_them_together(data: st.DataObject, version: int) -> None:
    keys = st.binary(min_size=16, max_size=16).filter(any) if version >= TOPIC_ID_VERSION else names.map(str.encode)
    topics = data.draw(st.lists(st.tuples(keys, partition_data), max_size=3))
    transactional_id, acks = data.draw(st.none() | names), data.draw(int16)
    timeout_ms = data.draw(st.integers(0, 2**31 - 1))
    body = memoryview(bytearray(request_bytes(version, transactional_id, acks, timeout_ms, topics)))
    request = parse_request(body, version)
    assert (request.transactional_id, request.acks, request.timeout_ms) == (transactional_id, acks, timeout_ms)
    found = [
        (key, [(index, None if view is None else bytes(view)) for index, view in batches]) for key, batches in request.topics
    ]
    assert found == topics


@given(st.data(), versions)
@settings(deadline=None)
def test_a_request_cut_short_is_corrupt_and_never_anything_else(data: st.DataObject, version: int) -> None:
    body = request_bytes(version, None, -1, 1000, [(b"0123456789abcdef", [(0, b"x" * 200), (1, b"")])])
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(Corrupt):
        parse_request(memoryview(bytearray(body[:cut])), version)


@given(st.binary(max_size=200), versions)
@settings(deadline=None)
def test_garbage_is_corrupt_or_a_request(garbage: bytes, version: int) -> None:
    with contextlib.suppress(Corrupt):
        parse_request(memoryview(bytearray(garbage)), version)


leaders = st.builds(Leader, st.integers(0, 3), int32, st.sampled_from(["broker", "host.example"]), int32, st.just(""))
codes = st.sampled_from([0, 0, 0, 3, 6, 7, 19, 87])


@st.composite
def results(draw: st.DrawFn) -> PartitionResult:
    code = draw(codes)
    if code == 0:
        return PartitionResult(draw(int32), 0, draw(int64), draw(times_ms), draw(int64))
    leader = draw(st.none() | leaders) if code == 6 else None
    return PartitionResult(draw(int32), code, -1, -1, -1, draw(st.none() | names), leader)


def kio_response(version: int, topics: list[tuple[bytes, list[PartitionResult]]]) -> bytes:
    new = response_factory(0, version)
    found: dict[int, Leader] = {}

    def partition(result: PartitionResult) -> Any:
        values: dict[str, Any] = {
            "index": result.partition,
            "error_code": ErrorCode(result.error_code),
            "base_offset": result.base_offset,
            "log_append_time": _time(result.log_append_time_ms),
            "log_start_offset": result.log_start_offset,
            "record_errors": (),
            "error_message": result.error_message,
        }
        if result.leader is not None and version >= LEADER_VERSION:
            found[result.leader.broker_id] = result.leader
            leader = new("LeaderIdAndEpoch", leader_id=result.leader.broker_id, leader_epoch=result.leader.leader_epoch)
            values["current_leader"] = leader
        return new("PartitionProduceResponse", **values)

    responses = tuple(
        new(
            "TopicProduceResponse",
            name=None if version >= TOPIC_ID_VERSION else key.decode(),
            topic_id=UUID(bytes=key) if version >= TOPIC_ID_VERSION else None,
            partition_responses=tuple(partition(result) for result in results),
        )
        for key, results in topics
    )
    endpoints = tuple(
        new("NodeEndpoint", node_id=one.broker_id, host=one.host, port=one.port, rack=one.rack or None)
        for one in found.values()
    )
    return kio_encode(new("ProduceResponse", responses=responses, node_endpoints=endpoints))


def _time(milliseconds: int) -> datetime.datetime | None:
    if milliseconds < 0:
        return None
    return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(milliseconds=milliseconds)


@given(st.data(), versions)
@settings(deadline=None)
def test_responses_are_byte_for_byte_what_kio_writes(data: st.DataObject, version: int) -> None:
    keys = st.binary(min_size=16, max_size=16).filter(any) if version >= TOPIC_ID_VERSION else names.map(str.encode)
    topics = data.draw(st.lists(st.tuples(keys, st.lists(results(), max_size=4)), max_size=3))
    assert encode_response(topics, version) == kio_response(version, topics)


def test_flexible_versions_begin_where_kafka_says() -> None:
    assert FLEXIBLE_VERSION == 9
