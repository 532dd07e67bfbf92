"""The plain record codec: round trips, the very bytes of another implementation, and refusal of what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from stratalog_core.batches.batch import HEADER_BYTES, TIMESTAMP_TYPE_BIT, check_batch
from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import Record, build_batch, decode_varint, encode_varint, iterate_records
from stratalog_core.errors import Corrupt

header_lists = st.lists(st.tuples(st.text(max_size=6), st.none() | st.binary(max_size=9)), max_size=3).map(tuple)
fields = st.none() | st.binary(max_size=30) | st.binary(min_size=100, max_size=300)
record_parts = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 2**42), fields, fields, header_lists), min_size=1, max_size=9
)


def records_of(parts: list[Any], base_offset: int, *, gaps: bool = True) -> list[Record]:
    made, offset = [], base_offset
    for step, timestamp_ms, key, value, headers in parts:
        made.append(Record(offset=offset, timestamp_ms=timestamp_ms, key=key, value=value, headers=headers))
        offset += step if gaps else 1
    return made


@settings(deadline=None)
@given(record_parts, st.integers(0, 2**40), st.sampled_from(list(NAMES.values())))
def test_records_come_back(parts: list[Any], base_offset: int, codec: int) -> None:
    records = records_of(parts, base_offset)
    batch = build_batch(records, compression=codec, leader_epoch=3, producer_id=9, producer_epoch=2, base_sequence=5)
    header = check_batch(batch)
    assert list(iterate_records(batch)) == records
    assert (header.base_offset, header.last_offset) == (records[0].offset, records[-1].offset)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 2, 5)
    assert header.max_timestamp_ms == max(record.timestamp_ms for record in records)


@settings(deadline=None)
@given(record_parts)
def test_bytes_are_those_of_kafka_python(parts: list[Any]) -> None:
    records = records_of(parts, 0, gaps=False)
    theirs = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 1 << 20)
    for record in records:
        theirs.append(record.offset, record.timestamp_ms, record.key, record.value, list(record.headers))
    ours = build_batch(records)
    # They leave the leader epoch, which no checksum covers, at another value.
    assert ours[16:] == bytes(theirs.build())[16:]
    assert [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in DefaultRecordBatch(bytes(ours))] == [
        (r.offset, r.timestamp_ms, r.key, r.value, r.headers) for r in records
    ]


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=3))
def test_varints_come_back(value: int, before: bytes) -> None:
    encoded = before + encode_varint(value) + b"\x80"
    assert decode_varint(memoryview(encoded), len(before)) == (value, len(encoded) - 1)


@pytest.mark.parametrize("content", [b"", b"\x80", b"\xff" * 9, b"\x80" * 10 + b"\x01", b"\xff" * 9 + b"\x02"])
def test_varints_that_do_not_end_or_fit_are_refused(content: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_varint(memoryview(content), 0)


def test_the_brokers_time_stands_for_all_records() -> None:
    records = [Record(offset=offset, timestamp_ms=offset, key=None, value=b"v") for offset in range(3)]
    batch = build_batch(records, attributes=TIMESTAMP_TYPE_BIT)
    assert [record.timestamp_ms for record in iterate_records(batch)] == [2, 2, 2]


@settings(deadline=None, max_examples=150)
@given(record_parts, st.integers(0, 5000), st.integers(0, 255), st.sampled_from(list(NAMES.values())))
def test_damage_gives_records_or_corrupt(parts: list[Any], position: int, byte: int, codec: int) -> None:
    batch = build_batch(records_of(parts, 10), compression=codec)
    batch[HEADER_BYTES + position % (len(batch) - HEADER_BYTES)] = byte
    try:
        offsets = [record.offset for record in iterate_records(batch)]
    except Corrupt:
        return
    assert offsets == sorted(set(offsets))


def test_offsets_that_do_not_rise_are_refused() -> None:
    records = [Record(offset=offset, timestamp_ms=0, key=None, value=None) for offset in (4, 5)]
    batch = build_batch(records)
    offset_delta = len(batch) - 4
    assert batch[offset_delta] == 2
    for delta in (0, 4):
        batch[offset_delta] = delta
        with pytest.raises(Corrupt, match="is not above"):
            list(iterate_records(batch))


def test_bytes_behind_the_last_record_are_refused() -> None:
    batch = build_batch([Record(offset=0, timestamp_ms=0, key=None, value=None)]) + b"\x00"
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    with pytest.raises(Corrupt, match="1 bytes follow"):
        list(iterate_records(batch))
