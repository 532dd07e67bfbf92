"""The compiled decoder against the plain one of ``stratalog_core.batches.records``, and against damage of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stratalog_core.batches import compression
from stratalog_core.batches.batch import CONTROL_BIT, CRC_START, HEADER_BYTES, TIMESTAMP_TYPE_BIT, read_header
from stratalog_core.batches.records import Record, build_batch, encode_varint, iterate_records
from stratalog_core.errors import Corrupt
from stratalog_pipeline.arrow.decode import BatchDecoder, decode_run
from stratalog_pipeline.arrow.kernels import TIMESTAMP_MS_MAX, Room
from stratalog_pipeline.arrow.schema import COLUMNS, COLUMNS_WITH_HEADERS, arrow_schema

pytestmark = pytest.mark.computes
CODECS = tuple(compression.NAMES.values())
Row = tuple[int, int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]

byte_strings = st.none() | st.binary(max_size=40) | st.binary(min_size=120, max_size=300)
header_lists = st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=20)), max_size=4)
record_parts = st.tuples(st.integers(1, 5), st.integers(-(2**40), 2**42), byte_strings, byte_strings, header_lists)


def records_of(parts: Sequence[tuple[int, int, bytes | None, bytes | None, list[Any]]], base_offset: int) -> list[Record]:
    records: list[Record] = []
    offset = base_offset - 1
    for step, timestamp_ms, key, value, headers in parts:
        offset = base_offset if not records else offset + step
        records.append(Record(offset=offset, timestamp_ms=timestamp_ms, key=key, value=value, headers=tuple(headers)))
    return records


def rows_of(batches: Sequence[pa.RecordBatch]) -> list[Row]:
    rows: list[Row] = []
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(arrow_schema(COLUMNS_WITH_HEADERS))
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        for row, time_us in zip(batch.to_pylist(), times, strict=True):
            assert (row["topic"], row["partition"]) == ("topic", 3)
            headers = tuple((header["key"], header["value"]) for header in row["headers"] or ())
            rows.append((row["offset"], time_us, row["timestampType"], row["key"], row["value"], headers))
    return rows


def expected_rows(batch: bytearray) -> list[Row]:
    kind = int(read_header(batch).is_log_append_time)
    return [(r.offset, r.timestamp_ms * 1000, kind, r.key, r.value, r.headers) for r in iterate_records(batch)]


def decoded(run: bytes | bytearray, **options: Any) -> list[pa.RecordBatch]:
    return list(decode_run(run, topic="topic", partition=3, columns=options.pop("columns", COLUMNS_WITH_HEADERS), **options))


def renewed_crc(batch: bytearray) -> bytearray:
    batch[17:21] = crc32c(memoryview(batch)[CRC_START:]).to_bytes(4, "big")
    return batch


@settings(max_examples=150, deadline=None)
@given(st.lists(record_parts, min_size=1, max_size=12), st.integers(0, 2**40), st.sampled_from(CODECS), st.booleans())
def test_kernels_give_what_the_plain_decoder_gives(parts: list[Any], base_offset: int, codec: int, append_time: bool) -> None:
    attributes = TIMESTAMP_TYPE_BIT if append_time else 0
    batch = build_batch(records_of(parts, base_offset), compression=codec, attributes=attributes)
    assert rows_of(decoded(batch)) == expected_rows(batch)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(record_parts, min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 400),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_bounds_cut_results_without_losing_a_row(
    parts: list[Any], rows_max: int, data_bytes: int, headers_max: int, copies: int
) -> None:
    first = build_batch(records_of(parts, 0), compression=compression.LZ4)
    run, base = bytearray(first), read_header(first).next_offset
    for number in range(1, copies):
        run += build_batch(records_of(parts, base * number), compression=compression.ZSTD)
    bounds = Room(rows=rows_max, data_bytes=data_bytes, headers=headers_max)
    results = decoded(run, bounds=bounds)
    assert rows_of(results) == rows_of(decoded(run))
    assert all(result.num_rows <= rows_max for result in results)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(record_parts, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6),
    st.sampled_from(CODECS),
)
def test_damage_behind_a_right_crc_is_refused_exactly_where_the_plain_decoder_refuses(
    parts: list[Any], damage: list[tuple[int, int]], codec: int
) -> None:
    batch = build_batch(records_of(parts, 7), compression=codec)
    for position, byte in damage:
        batch[HEADER_BYTES + position % (len(batch) - HEADER_BYTES)] = byte
    renewed_crc(batch)
    try:
        expected = expected_rows(batch)
    except Corrupt:
        with pytest.raises(Corrupt):
            decoded(batch)
        return
    if any(abs(row[1]) > TIMESTAMP_MS_MAX * 1000 for row in expected):
        return
    assert [row[:5] for row in rows_of(decoded(batch))] == [row[:5] for row in expected]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(-2, 400), st.integers(-5, 400), st.integers(-(2**63), 2**63 - 1))
@example(b"\x0e\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00\x01\x01\x00", 1, 0, -(2**63))
def test_arbitrary_bytes_never_crash(body: bytes, record_count: int, last_offset_delta: int, timestamp_ms: int) -> None:
    batch = build_batch([Record(offset=0, timestamp_ms=0, key=None, value=None)])[:HEADER_BYTES] + body
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    batch[23:27] = last_offset_delta.to_bytes(4, "big", signed=True)
    batch[27:35] = batch[35:43] = timestamp_ms.to_bytes(8, "big", signed=True)
    batch[57:61] = record_count.to_bytes(4, "big", signed=True)
    renewed_crc(batch)
    try:
        for result in decoded(batch):
            result.validate(full=True)
    except Corrupt:
        pass


def one(offset: int, **fields: Any) -> Record:
    return Record(**{"offset": offset, "timestamp_ms": 5, "key": b"k", "value": b"v", **fields})


def test_only_wanted_offsets_are_yielded() -> None:
    batch = build_batch([one(offset) for offset in range(10, 20)])
    assert [row[0] for row in rows_of(decoded(batch, first_offset=13, end_offset=16))] == [13, 14, 15]
    assert decoded(batch, first_offset=20) == []
    assert decoded(batch, end_offset=10) == []


def test_columns_come_in_the_wanted_order_and_the_rest_is_left_out() -> None:
    (result,) = decoded(build_batch([one(4), one(5)]), columns=("offset", "key"))
    assert result.schema.names == ["offset", "key"]
    assert result.to_pylist() == [{"offset": 4, "key": b"k"}, {"offset": 5, "key": b"k"}]
    (plain,) = decoded(build_batch([one(4)]), columns=COLUMNS)
    assert "headers" not in plain.schema.names


def test_control_and_skipped_batches_yield_nothing() -> None:
    run = build_batch([one(0)]) + build_batch([one(1)], attributes=CONTROL_BIT) + build_batch([one(2)])
    decoder = BatchDecoder(topic="topic", partition=3, columns=("offset",))
    decoder_output = [*decoder.decode(run, skip=lambda header: header.base_offset == 2), *decoder.finish()]
    assert [batch.to_pylist() for batch in decoder_output] == [[{"offset": 0}]]


def test_a_record_beyond_the_bounds_comes_alone() -> None:
    big = one(1, value=b"x" * 100_000, headers=tuple((f"name{n}", b"y" * 9) for n in range(50)))
    run = build_batch([one(0), big, one(2)])
    results = decoded(run, bounds=Room(rows=10, data_bytes=1000, headers=3))
    assert [result.num_rows for result in results] == [1, 1, 1]
    assert rows_of(results) == expected_rows(run)


def test_malformed_header_names_become_replacement_characters() -> None:
    body = b"\x00" + encode_varint(0) * 2 + encode_varint(-1) * 2 + encode_varint(2)
    body += encode_varint(2) + b"\xffa" + encode_varint(-1) + encode_varint(2) + "é".encode() + encode_varint(-1)
    batch = build_batch([one(0)])[:HEADER_BYTES] + encode_varint(len(body)) + body
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    (row,) = rows_of(decoded(renewed_crc(batch)))
    assert row[5] == (("\ufffda", None), ("é", None))


def test_a_flipped_bit_names_topic_partition_and_offsets() -> None:
    batch = build_batch([one(40), one(41)])
    batch[-1] ^= 1
    with pytest.raises(Corrupt, match=r"topic-3: record batch at offsets 40\.\.41: it does not match its CRC"):
        decoded(batch)


def test_batches_that_cannot_be_read_are_left_out_as_a_whole_on_request() -> None:
    flipped, repeated = build_batch([one(10), one(11)]), build_batch([one(20), one(21), one(22)])
    flipped[-1] ^= 1
    repeated[-6] = 0  # the offset of the last record is that of the first
    packed = build_batch([one(30)], compression=compression.ZSTD)
    packed[HEADER_BYTES] ^= 1
    good = [build_batch([one(first), one(first + 1)]) for first in (0, 15, 25, 40)]
    run = good[0] + flipped + good[1] + renewed_crc(repeated) + good[2] + renewed_crc(packed) + good[3]
    for rows_max in (1, 2, 100):
        bounds = Room(rows=rows_max, data_bytes=10_000, headers=10)
        decoder = BatchDecoder(topic="topic", partition=3, columns=("offset",), bounds=bounds)
        problems: list[Corrupt] = []
        made = [*decoder.decode(run, on_corrupt=problems.append), *decoder.finish()]
        assert [row["offset"] for batch in made for row in batch.to_pylist()] == [0, 1, 15, 16, 25, 26, 40, 41]
        assert [bad.detail["base_offset"] for bad in problems] == [10, 20, 30]
        assert "topic-3: record batch at offsets 20..22" in problems[1].message
    with pytest.raises(Corrupt, match=r"offsets 10\.\.11"):
        decoded(run)


def test_after_a_bad_length_the_rest_of_a_run_is_left_out_on_request() -> None:
    long = build_batch([one(1)])
    long[8:12] = (10_000).to_bytes(4, "big")
    decoder = BatchDecoder(topic="topic", partition=3, columns=("offset",))
    problems: list[Corrupt] = []
    made = [*decoder.decode(build_batch([one(0)]) + long, on_corrupt=problems.append), *decoder.finish()]
    assert [batch.to_pylist() for batch in made] == [[{"offset": 0}]]
    (bad,) = problems
    assert "claims 10012 bytes" in bad.message


def test_repeated_offsets_are_refused() -> None:
    batch = build_batch([one(0), one(1)])
    batch[-6] = 0
    with pytest.raises(Corrupt, match="does not increase"):
        decoded(renewed_crc(batch))


def test_times_beyond_microseconds_are_refused() -> None:
    for timestamp_ms in (TIMESTAMP_MS_MAX + 1, -TIMESTAMP_MS_MAX - 1, 2**63 - 1, -(2**63)):
        with pytest.raises(Corrupt, match="timestamp"):
            decoded(build_batch([one(0, timestamp_ms=timestamp_ms)]))


@pytest.mark.parametrize("timestamp_ms", [2**63 - 1, -(2**63)])
def test_times_that_are_not_selected_may_be_anything(timestamp_ms: int) -> None:
    """So it is with records from brokers, which the same query reads before they are offloaded."""
    batch = build_batch([one(0, timestamp_ms=timestamp_ms)])
    (rows,) = decoded(batch, columns=("offset", "timestampType", "value"))
    assert rows.to_pylist() == [{"offset": 0, "timestampType": 0, "value": one(0).value}]
    refused: list[Corrupt] = []
    decoder = BatchDecoder(topic="topic", partition=3, columns=("offset",))
    list(decoder.decode(batch, on_corrupt=refused.append))
    assert ([rows.num_rows for rows in decoder.finish()], refused) == ([1], [])


def test_a_foreign_magic_is_refused() -> None:
    batch = build_batch([one(0)])
    batch[16] = 1
    with pytest.raises(Corrupt, match="magic 1"):
        decoded(batch)
