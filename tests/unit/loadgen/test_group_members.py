"""Members of groups without librdkafka: what they put on the wire, and how they range_assignments partitions."""

from __future__ import annotations

import io
import struct
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode
from kio.schema.fetch.v11.response import FetchableTopicResponse, FetchResponse, PartitionData
from kio.schema.types import BrokerId, TopicName
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import Records, i32, i32Timedelta, i64

from stratalog.kafka_connection import FETCH, NotAnswered, request_part, taken_frames
from stratalog_core.batches.records import Record, build_batch
from stratalog_loadgen.clients.fetching import Fetched, fetch_request, fetched, records_of
from stratalog_loadgen.clients.group_members import assigned_partitions, range_assignments

_SCHEMA: Any = load_request_schema(FETCH, 11)


@given(st.text("abc", min_size=1, max_size=20), st.dictionaries(st.integers(0, 9999), st.integers(0, 2**62), max_size=5))
def test_a_fetch_is_what_kio_would_read(topic: str, positions: dict[int, int]) -> None:
    frame = memoryview(fetch_request(topic, positions)).toreadonly()
    header, at = entity_reader(_SCHEMA.__header_schema__)(frame, 0)
    request, used = entity_reader(_SCHEMA)(frame, at)
    assert (header.request_api_key, header.request_api_version, header.client_id) == (FETCH, 11, "stratalog")
    assert at + used in (len(frame), len(frame) + at)
    assert (request.session_id, request.session_epoch, request.min_bytes) == (0, -1, 1)
    (asked,) = request.topics
    assert asked.topic == topic
    assert {each.partition: each.fetch_offset for each in asked.partitions} == positions


def _answer(error: ErrorCode, *partitions: tuple[int, ErrorCode, bytes | None]) -> memoryview:
    rows = tuple(
        PartitionData(
            partition_index=i32(number),
            error_code=code,
            high_watermark=i64(9),
            last_stable_offset=i64(9),
            log_start_offset=i64(0),
            aborted_transactions=(),
            preferred_read_replica=BrokerId(-1),
            records=Records(records) if records is not None else None,
        )
        for number, code, records in partitions
    )
    answer = FetchResponse(
        throttle_time=i32Timedelta.parse(timedelta(0)),
        error_code=error,
        session_id=i32(0),
        responses=(FetchableTopicResponse(topic=TopicName("topic"), partitions=rows),),
    )
    with io.BytesIO() as buffer:
        buffer.write(bytes(4))  # the header: a correlation id
        entity_writer(FetchResponse)(buffer, answer)
        return memoryview(buffer.getvalue())


def _batch(*offsets: int) -> bytes:
    return bytes(build_batch([Record(offset=offset, timestamp_ms=1, key=None, value=b"v") for offset in offsets]))


@given(st.lists(st.binary(max_size=9), max_size=6), st.lists(st.integers(1, 12)))
def test_answers_are_cut_out_of_whatever_pieces_come(answers: list[bytes], sizes: list[int]) -> None:
    stream, received, found = b"".join(struct.pack(">i", len(each)) + each for each in answers), bytearray(), list[bytes]()
    for size in [*sizes, len(stream)]:
        received += stream[:size]
        stream = stream[size:]
        found += taken_frames(received)
    assert found == answers
    assert not received


def test_an_answer_is_read_partition_by_partition() -> None:
    content = _batch(3, 4)
    found = list(fetched(_answer(ErrorCode.none, (5, ErrorCode.none, content), (7, ErrorCode.not_leader_or_follower, None))))
    assert found == [Fetched(5, 0, memoryview(content)), Fetched(7, 6, memoryview(b""))]
    with pytest.raises(NotAnswered, match="error 70"):
        list(fetched(_answer(ErrorCode.fetch_session_id_not_found)))


def test_records_before_the_position_and_of_a_batch_that_was_cut_off_are_left_out() -> None:
    content = _batch(3, 4, 5) + _batch(6, 7) + _batch(8)[:-1]
    assert [record.offset for record in records_of(memoryview(content), 4)] == [4, 5, 6, 7]
    assert list(records_of(memoryview(b""), 0)) == []


@given(st.integers(1, 40), st.integers(0, 100))
def test_every_partition_has_one_owner_and_shares_are_even(members: int, partitions: int) -> None:
    assignments = [
        assigned_partitions(content)
        for content in range_assignments([f"m{number:02}" for number in range(members)], list(range(partitions))).values()
    ]
    assert [partition for share in assignments for partition in share] == list(range(partitions))
    assert max(map(len, assignments)) - min(map(len, assignments)) <= 1


def test_parts_of_requests_have_the_names_that_kio_gives_them() -> None:
    assert request_part(FETCH, "FetchPartition").__name__ == "FetchPartition"
