"""The compiled encoder against the plain decoder, and its choice of partitions against another client's."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner import murmur2

from stratalog_core.batches.batch import HEADER_BYTES, check_batch
from stratalog_core.batches.compression import NAMES, NONE, compress
from stratalog_core.batches.records import Record, iterate_records
from stratalog_core.errors import Invalid
from stratalog_pipeline.arrow import encode
from stratalog_pipeline.arrow.encode import encode_batches, partitions_of

NOW_MS = 1_700_000_000_000
Row = tuple[bytes | None, bytes | None, int | None, list[tuple[str, bytes | None]] | None]
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def arrow(rows: list[Row]) -> pa.RecordBatch:
    headers = [None if each is None else [{"key": key, "value": value} for key, value in each] for *_, each in rows]
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([row[0] for row in rows], pa.binary()),
            "value": pa.array([row[1] for row in rows], pa.binary()),
            "timestamp": pa.array([None if row[2] is None else row[2] * 1000 for row in rows], pa.timestamp("us", tz="UTC")),
            "headers": pa.array(headers, HEADERS),
        }
    )


def decoded(rows: pa.RecordBatch, base_offset: int = 0, codec: int = 0) -> list[Record]:
    """The records of all batches, each of which must be valid and continue the one before."""
    records: list[Record] = []
    for batch in encode_batches(rows, base_offset, codec, NOW_MS):
        header = check_batch(batch)
        assert (header.base_offset, header.compression) == (base_offset + len(records), codec)
        found = list(iterate_records(batch))
        assert len(found) == header.record_count == header.last_offset_delta + 1
        assert header.base_timestamp_ms == found[0].timestamp_ms
        assert header.max_timestamp_ms == max(record.timestamp_ms for record in found)
        records += found
    return records


def expected(rows: list[Row], base_offset: int = 0) -> list[Record]:
    return [
        Record(
            offset=base_offset + number, timestamp_ms=NOW_MS if time is None else time, key=key, value=value,
            headers=tuple(headers or ()),
        )
        for number, (key, value, time, headers) in enumerate(rows)
    ]  # fmt: skip


ROWS = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=300),
        st.none() | st.binary(max_size=300),
        st.none() | st.integers(0, 4_000_000_000_000),
        st.none() | st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3),
    ),
    max_size=40,
)


@given(rows=ROWS, base_offset=st.integers(0, 2**40), batch_bytes=st.sampled_from([1, 200, 1 << 18]), skipped=st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_every_row_is_a_record(rows: list[Row], base_offset: int, batch_bytes: int, skipped: int) -> None:
    before, encode.BATCH_BYTES = encode.BATCH_BYTES, batch_bytes  # type: ignore[misc]
    try:
        found = decoded(arrow(rows).slice(skipped), base_offset)
    finally:
        encode.BATCH_BYTES = before  # type: ignore[misc]
    assert found == expected(rows[skipped:], base_offset)


@pytest.mark.parametrize("codec", NAMES.values(), ids=NAMES)
def test_batches_are_compressed_by_every_codec(codec: int) -> None:
    rows: list[Row] = [(b"k", b"v" * 100, NOW_MS + number, []) for number in range(3000)]
    assert decoded(arrow(rows), 7, codec) == expected(rows, 7)


@pytest.mark.parametrize("codec", [codec for codec in NAMES.values() if codec != NONE])
def test_each_batch_is_compressed_by_itself(codec: int) -> None:
    rows: list[Row] = [(b"k%d" % number, b"v" * (number % 700), NOW_MS + number, []) for number in range(3000)]
    plain = list(encode_batches(arrow(rows), 7, NONE, NOW_MS))
    packed = list(encode_batches(arrow(rows), 7, codec, NOW_MS))
    assert len(plain) > 2
    assert [batch[HEADER_BYTES:] for batch in packed] == [compress(codec, batch[HEADER_BYTES:]) for batch in plain]


def test_strings_and_missing_columns() -> None:
    rows = pa.RecordBatch.from_pydict({"value": pa.array(["a", None, "ü" * 70])})
    found = decoded(rows)
    assert [record.value for record in found] == [b"a", None, ("ü" * 70).encode()]
    assert {(record.key, record.headers, record.timestamp_ms) for record in found} == {(None, (), NOW_MS)}


def test_a_header_without_a_key_and_a_row_that_is_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = pa.array([[{"key": None, "value": b"v"}]], HEADERS)
    nameless = pa.RecordBatch.from_pydict({"value": pa.array([b"v"]), "headers": headers})
    with pytest.raises(Invalid, match="a header has no key"):
        decoded(nameless)
    monkeypatch.setattr(encode, "_RECORD_BYTES_LIMIT", 1000)
    with pytest.raises(Invalid, match="maximum is 1000"):
        decoded(arrow([(None, b"v" * 1000, None, None)]))


def test_keys_go_where_another_client_sends_them() -> None:
    source = random.Random(5)
    keys: list[bytes | None] = [source.randbytes(length) for length in range(40) for _ in range(5)]
    keys[7] = None
    for count in (1, 3, 12, 1000):
        found = partitions_of(pa.array(keys, pa.binary()).slice(1), count).to_pylist()
        assert found == [None if key is None else (murmur2(key) & 0x7FFFFFFF) % count for key in keys[1:]]
