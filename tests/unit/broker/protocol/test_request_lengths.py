"""Lengths in requests are checked before kio reserves memory for them; unknown tagged fields are left out."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_request_schema
from kio.serial import entity_reader
from kio.serial.errors import SerialError
from unit.broker.raw_client import fetch_request, request

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.protocol.entities import decode_request
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.protocol.frame import ELEMENTS_MAX, TAGGED_FIELDS_MAX, skip_tagged_fields, write_uvarint
from stratalog_broker.protocol.produce import parse_request
from stratalog_broker.protocol.request_lengths import checked_request
from stratalog_core.errors import Corrupt

SERVED = [
    (key, version)
    for key, info in sorted(HANDLERS.items())
    if info.handle is not None or key == 1
    for version in range(info.min_version, info.max_version + 1)
]
METADATA, LIST_OFFSETS, FIND_COORDINATOR = 3, 2, 10
PIECES = st.sampled_from(
    [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff\x0f", b"\x00", b"\x00\x00\x00\x01", b"\x02", b"\x00\x03abc", b"\x04abc", b"\xff"]
)


@given(st.sampled_from(SERVED), st.lists(PIECES | st.binary(max_size=8), max_size=16).map(b"".join))
def test_what_is_accepted_ends_where_kio_says(api: tuple[int, int], body: bytes) -> None:
    try:
        checked = checked_request(*api, memoryview(body))
    except Corrupt:
        return
    try:
        _, used = entity_reader(load_request_schema(*api))(checked, 0)
    except (SerialError, ValueError):
        return
    assert used == len(checked)


@pytest.mark.parametrize("length", [b"\x7f\xff\xff\xff", struct.pack(">i", 100)])
def test_an_array_longer_than_its_request_is_refused_before_memory_is_reserved(length: bytes) -> None:
    with pytest.raises(Corrupt, match="elements in"):
        decode_request(METADATA, 1, memoryview(length + bytes(20)))


def test_a_compact_array_longer_than_its_request_is_refused() -> None:
    with pytest.raises(Corrupt, match="elements in"):
        decode_request(METADATA, 12, memoryview(b"\xff\xff\xff\xff\x0f" + bytes(20)))


def test_null_stands_only_for_an_array_that_may_be_missing() -> None:
    with pytest.raises(Corrupt, match="no array"):
        decode_request(FIND_COORDINATOR, 4, memoryview(b"\x00\x00\x00"))
    with pytest.raises(Corrupt, match="no array"):
        decode_request(LIST_OFFSETS, 1, memoryview(struct.pack(">ii", -1, -1)))
    assert decode_request(METADATA, 1, memoryview(struct.pack(">i", -1))).topics is None


def test_the_elements_of_one_request_are_bounded() -> None:
    names = ELEMENTS_MAX + 1
    with pytest.raises(Corrupt, match="use several requests"):
        decode_request(METADATA, 1, memoryview(struct.pack(">i", names) + b"\x00\x01a" * names))


def test_a_fetch_with_many_partitions_passes() -> None:
    body = encode_entity(fetch_request("flights", 5, version=12))
    assert checked_request(1, 12, memoryview(body)) == body
    assert decode_request(1, 12, memoryview(body + b"more")).topics[0].partitions[0].fetch_offset == 5


def test_unknown_tagged_fields_are_ignored() -> None:
    """KIP-482; kio alone answers them with a KeyError."""
    whole = encode_entity(request(1, 12, "FetchRequest", **fields_of_fetch(), cluster_id="c"))
    plain = encode_entity(request(1, 12, "FetchRequest", **fields_of_fetch()))
    assert whole.startswith(plain[:-1])
    known = whole[len(plain) :]
    foreign = write_uvarint(9) + write_uvarint(3) + b"abc"
    for tags in (b"\x01" + foreign, b"\x02" + known + foreign, b"\x03" + foreign + known + foreign):
        decoded = decode_request(1, 12, memoryview(plain[:-1] + tags))
        assert decoded.cluster_id == ("c" if known in tags else None)


def fields_of_fetch() -> dict[str, object]:
    made = fetch_request("flights", 5, version=12)
    return {name: getattr(made, name) for name in type(made).__slots__ if name != "cluster_id"}


def test_a_known_tagged_field_ends_where_it_said() -> None:
    plain = encode_entity(request(1, 12, "FetchRequest", **fields_of_fetch()))
    with pytest.raises(Corrupt, match="tagged field"):
        decode_request(1, 12, memoryview(plain[:-1] + b"\x01\x00\x05\x02c" + bytes(10)))


def test_a_missing_cursor_and_one_that_is_there() -> None:
    for cursor in (None, request(75, 0, "Cursor", topic_name="a", partition_index=3)):
        made = request(75, 0, "DescribeTopicPartitionsRequest", topics=(), response_partition_limit=3, cursor=cursor)
        assert decode_request(75, 0, memoryview(encode_entity(made))) == made


def test_tagged_fields_of_one_struct_are_bounded() -> None:
    tags = write_uvarint(TAGGED_FIELDS_MAX + 1) + b"\x09\x00" * (TAGGED_FIELDS_MAX + 1)
    with pytest.raises(Corrupt, match="tagged fields in one struct"):
        skip_tagged_fields(memoryview(tags), 0)


def test_topics_and_partitions_of_one_produce_request_are_bounded() -> None:
    plain = struct.pack(">hhii", -1, 1, 0, ELEMENTS_MAX) + (struct.pack(">h", 0) + struct.pack(">i", 1)) * 10
    with pytest.raises(Corrupt, match="use several requests"):
        parse_request(memoryview(plain), 3)
    flexible = b"\x00" + struct.pack(">hi", 1, 0) + write_uvarint(2) + b"\x02a" + write_uvarint(ELEMENTS_MAX + 1)
    with pytest.raises(Corrupt, match="use several requests"):
        parse_request(memoryview(flexible), 9)
