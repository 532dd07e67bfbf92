"""Spans locate exactly the records that the plain decoder decodes, and refuse exactly what plain Python refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plain_compaction import Span, plain_expiry_ms, plain_spans

from stratalog_core.batches import record_kernels as kernels
from stratalog_core.batches.batch import BatchHeader, read_header
from stratalog_core.batches.record_spans import RecordSpans, batch_body, record_spans
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.errors import Corrupt

NAME = b"expires"
FIELDS = st.one_of(st.none(), st.binary(max_size=200), st.just(NAME))
TIMES = st.one_of(st.none(), st.binary(max_size=3), st.integers(0, 10**20).map(b"%d".__mod__))
HEADERS = st.lists(st.tuples(st.sampled_from(["expires", "expire", "expires2", "", "\u00e9"]), TIMES), max_size=4)
ROWS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 2**40), FIELDS, FIELDS, HEADERS), min_size=1, max_size=8)


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    records, offset = list[Record](), 100
    for step, timestamp_ms, key, value, headers in draw(ROWS):
        records.append(Record(offset=offset, timestamp_ms=timestamp_ms, key=key, value=value, headers=tuple(headers)))
        offset += step
    return bytes(build_batch(records, compression=draw(st.integers(0, 4))))


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, BatchHeader]:
    """A body that lost, gained or changed bytes, and a header that may claim other records."""
    batch = draw(batches())
    header = read_header(batch)
    body = bytearray(batch_body(batch, header))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(body)))
        body[at : at + draw(st.integers(0, 3))] = draw(st.one_of(st.binary(max_size=3), st.just(b"\xff" * 10)))
    count, last = (
        draw(st.sampled_from([0, 0, 0, 1, -1, 1000, 2**31 - 1 - header.record_count])),
        draw(st.sampled_from([0, 0, -1, 5])),
    )
    changed = header._replace(record_count=header.record_count + count, last_offset_delta=header.last_offset_delta + last)
    return bytes(body), changed


def in_plain(spans: RecordSpans) -> list[Span]:
    places = [kernels.START, kernels.END, kernels.TIMESTAMP_DELTA, kernels.OFFSET_AT, kernels.OFFSET_DELTA]
    keys, values = spans.keys(), spans.have_values.tolist()
    assert spans.have_keys.tolist() == [key is not None for key in keys]
    return [
        Span._make([*row, key, value]) for row, key, value in zip(spans.rows[:, places].tolist(), keys, values, strict=True)
    ]


@given(batches())
def test_spans_are_those_of_the_records(batch: bytes) -> None:
    header = read_header(batch)
    body = batch_body(batch, header)
    spans = record_spans(body, header)
    found = [
        (header.base_offset + each.offset_delta, header.base_timestamp_ms + each.timestamp_delta, each.key, each.has_value)
        for each in in_plain(spans)
    ]
    records = [*iterate_records(batch)]
    assert found == [(one.offset, one.timestamp_ms, one.key, one.value is not None) for one in records]
    assert b"".join(body[each.start : each.end] for each in in_plain(spans)) == body
    for row, record in enumerate(records):
        assert spans.headers(row) == [(name.encode(), value) for name, value in record.headers]


@given(damaged())
def test_any_bytes_are_read_or_refused_as_in_plain_python(content: tuple[bytes, BatchHeader]) -> None:
    body, header = content
    try:
        expected = plain_spans(body, header)
    except Corrupt:
        with pytest.raises(Corrupt):
            record_spans(body, header)
        return
    spans = record_spans(body, header)
    assert in_plain(spans) == expected
    times = [plain_expiry_ms(body, span, NAME) for span in expected]
    assert spans.expiry_ms(NAME).tolist() == [kernels.NEVER if each is None else min(each, 2**63 - 1) for each in times]


@pytest.mark.parametrize("claimed", [-5, 0])
def test_a_batch_without_records_has_no_spans(claimed: int) -> None:
    header = read_header(build_batch([Record(offset=0, timestamp_ms=0, key=b"k", value=b"v")]))._replace(record_count=claimed)
    assert len(record_spans(b"", header)) == 0
    with pytest.raises(Corrupt):
        record_spans(b"\x00", header)


def test_kernels_write_no_more_than_there_is_room() -> None:
    batch = build_batch([Record(offset=each, timestamp_ms=each, key=b"k" * 9, value=b"v" * 9) for each in range(3)])
    header = read_header(batch)
    spans = record_spans(batch_body(batch, header), header)
    every = np.ones(3, np.bool_)
    for size in range(len(spans.body)):
        out = np.zeros(size, np.uint8)
        assert kernels.copy_records(spans.content, spans.rows, every, out) == kernels.NO_ROOM
        assert kernels.copy_moved(spans.content, spans.rows, every, -(2**62), out) == kernels.NO_ROOM
