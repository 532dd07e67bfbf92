"""The hand-written walk over Fetch requests against kio, which was made from Kafka's own message definitions."""

from __future__ import annotations

import datetime
import struct
import uuid
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kio.index import load_payload_module
from kio.static.constants import EntityType

from stratalog_broker.protocol.entities import decode_request
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.protocol.fetch_request import FetchRequest, parse_request
from stratalog_broker.protocol.frame import ELEMENTS_MAX, write_uvarint
from stratalog_core.errors import Corrupt

versions = st.integers(4, 18)
int32, int64 = (st.integers(-(2**bits), 2**bits - 1) for bits in (31, 63))
names = st.text(st.characters(codec="utf-8"), max_size=40)


def struct_of(version: int, kind: str, **values: Any) -> Any:
    """A struct of a request; fields that the version lacks are dropped."""
    made = getattr(load_payload_module(1, version, EntityType.request), kind)
    known = {field.name for field in fields(made)}
    return made(**{name: value for name, value in values.items() if name in known})


def request_of(version: int, **values: Any) -> bytes:
    """One that asks for nothing, but for ``values``."""
    nothing = {"max_wait": datetime.timedelta(0), "min_bytes": 1, "max_bytes": 1, "isolation_level": 0, "session_id": 0}
    nothing |= {"session_epoch": -1, "topics": (), "forgotten_topics_data": (), "rack_id": ""}
    return encode_entity(struct_of(version, "FetchRequest", **nothing | values))


def fields_of(parsed: FetchRequest) -> tuple[Any, ...]:
    wanted = [(one.key, one.index, one.offset, one.bytes_max, one.leader_epoch, one.last_epoch) for one in parsed.wanted]
    return (*parsed[:6], wanted, parsed.forgotten, parsed.rack)


def fields_by_kio(version: int, body: bytes) -> tuple[Any, ...]:
    decoded = decode_request(1, version, memoryview(body))

    def key(topic: Any) -> bytes:
        if version < 13:
            return str(topic.topic).encode()
        return bytes(16) if topic.topic_id is None else topic.topic_id.bytes

    return (
        round(decoded.max_wait.total_seconds() * 1000),
        decoded.min_bytes,
        decoded.max_bytes,
        decoded.isolation_level,
        getattr(decoded, "session_id", 0),
        getattr(decoded, "session_epoch", -1),
        [
            (
                key(topic),
                one.partition,
                one.fetch_offset,
                one.partition_max_bytes,
                getattr(one, "current_leader_epoch", -1),
                getattr(one, "last_fetched_epoch", -1),
            )
            for topic in decoded.topics
            for one in topic.partitions
        ],
        [(key(topic), index) for topic in getattr(decoded, "forgotten_topics_data", ()) for index in topic.partitions],
        getattr(decoded, "rack_id", "").encode(),
    )


@st.composite
def requests(draw: st.DrawFn, version: int) -> bytes:
    """A request as kio writes it, with what replicas send in some of them."""

    def topic_key() -> dict[str, Any]:
        return (
            {"topic": draw(names)} if version < 13 else {"topic_id": uuid.UUID(bytes=draw(st.binary(min_size=16, max_size=16)))}
        )

    def partition() -> Any:
        rare: dict[str, Any] = {}
        if version >= 17 and draw(st.booleans()):
            rare["replica_directory_id"] = uuid.UUID(int=draw(st.integers(1, 9)))
        if version >= 18 and draw(st.booleans()):
            rare["high_watermark"] = draw(int64)
        return struct_of(
            version, "FetchPartition", partition=draw(int32), fetch_offset=draw(int64), partition_max_bytes=draw(int32),
            current_leader_epoch=draw(int32), **rare,
        )  # fmt: skip

    topics = tuple(
        struct_of(version, "FetchTopic", **topic_key(), partitions=tuple(partition() for _ in range(draw(st.integers(0, 4)))))
        for _ in range(draw(st.integers(0, 3)))
    )
    forgotten = tuple(
        struct_of(version, "ForgottenTopic", **topic_key(), partitions=tuple(draw(st.lists(int32, max_size=3))))
        for _ in range(draw(st.integers(0, 2) if version >= 7 else st.just(0)))
    )
    rare = {"cluster_id": draw(st.none() | st.just("c"))} if version >= 12 else {}
    if version >= 15 and draw(st.booleans()):
        rare["replica_state"] = struct_of(version, "ReplicaState", replica_id=3, replica_epoch=draw(int64))
    return request_of(
        version, max_wait=datetime.timedelta(milliseconds=draw(st.integers(0, 2**31 - 1))),
        min_bytes=draw(int32), max_bytes=draw(int32), isolation_level=draw(st.integers(0, 1)), session_id=draw(int32),
        session_epoch=draw(int32), topics=topics, forgotten_topics_data=forgotten, rack_id=draw(names), **rare,
    )  # fmt: skip


@given(st.data(), versions)
@settings(deadline=None)
def test_requests_are_read_as_kio_reads_them(data: st.DataObject, version: int) -> None:
    body = data.draw(requests(version))
    assert fields_of(parse_request(memoryview(body), version)) == fields_by_kio(version, body)
    assert fields_of(parse_request(memoryview(body + b"more"), version)) == fields_by_kio(version, body)


@given(st.data(), versions)
@settings(deadline=None)
def test_a_request_that_was_cut_or_changed_is_refused_or_read_as_kio_reads_it(data: st.DataObject, version: int) -> None:
    body = bytearray(data.draw(requests(version)))
    if body and data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3)) if body else 0):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        parsed = parse_request(memoryview(body), version)
    except Corrupt:
        return
    try:
        by_kio = fields_by_kio(version, bytes(body))
    except Corrupt:
        return
    assert fields_of(parsed) == by_kio


@given(st.binary(max_size=120), versions)
@example(b"", 4)
def test_any_bytes_are_read_or_refused(body: bytes, version: int) -> None:
    try:
        parse_request(memoryview(body), version)
    except Corrupt:
        return


def test_every_cut_of_a_request_is_refused() -> None:
    for version in (4, 7, 11, 12):
        wanted = struct_of(
            version, "FetchPartition", partition=1, fetch_offset=5, partition_max_bytes=9, current_leader_epoch=-1
        )  # fmt: skip
        whole = request_of(version, topics=(struct_of(version, "FetchTopic", topic="flights", partitions=(wanted,)),))
        for size in range(len(whole)):
            with pytest.raises(Corrupt):
                parse_request(memoryview(whole[:size]), version)


def test_an_array_longer_than_its_request_is_refused() -> None:
    head = struct.pack(">iiiib", -1, 0, 0, 0, 0)
    topic = struct.pack(">i", 1) + b"\x00\x01a"
    with pytest.raises(Corrupt, match="claims 90000 elements"):
        parse_request(memoryview(head + topic + struct.pack(">i", 90_000) + bytes(40)), 4)
    with pytest.raises(Corrupt, match="use several requests"):
        parse_request(memoryview(head + topic + struct.pack(">i", ELEMENTS_MAX) + bytes(40)), 4)
    with pytest.raises(Corrupt, match="null"):
        parse_request(memoryview(head + struct.pack(">i", -1)), 4)


def test_unknown_tagged_fields_are_passed_over() -> None:
    """KIP-482; those of a partition move the partitions behind it."""
    tags = b"\x01" + write_uvarint(9) + write_uvarint(3) + b"abc"
    partition = struct.pack(">iiqiqi", 1, 2, 3, -1, -1, 4)
    body = struct.pack(">iiibii", 500, 1, 9, 0, 0, -1) + b"\x02" + bytes(16)
    body += b"\x04" + partition + b"\x00" + partition + tags + partition + b"\x00" + tags + b"\x01\x01" + tags
    wanted = parse_request(memoryview(body), 16).wanted
    assert [(one.index, one.leader_epoch, one.offset, one.bytes_max) for one in wanted] == [(1, 2, 3, 4)] * 3
