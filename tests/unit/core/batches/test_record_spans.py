"""Spans locate exactly the records that the plain decoder decodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.record_spans import batch_body, record_spans
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.errors import Corrupt

FIELDS = st.one_of(st.none(), st.binary(max_size=200))
RECORDS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 2**40), FIELDS, FIELDS, st.booleans()), min_size=1, max_size=20)


@given(rows=RECORDS, codec=st.integers(0, 4))
def test_spans_are_those_of_the_records(rows: list[tuple[int, int, bytes | None, bytes | None, bool]], codec: int) -> None:
    records, offset = list[Record](), 100
    for step, timestamp_ms, key, value, has_header in rows:
        headers = (("name", b"content"),) if has_header else ()
        records.append(Record(offset=offset, timestamp_ms=timestamp_ms, key=key, value=value, headers=headers))
        offset += step
    batch = build_batch(records, compression=codec)
    header = read_header(batch)
    body = batch_body(batch, header)
    spans = record_spans(body, header)
    found = [
        (header.base_offset + each.offset_delta, header.base_timestamp_ms + each.timestamp_delta, each.key, each.has_value)
        for each in spans
    ]
    assert found == [(one.offset, one.timestamp_ms, one.key, one.value is not None) for one in iterate_records(batch)]
    assert b"".join(body[each.start : each.end] for each in spans) == body


@given(cut=st.integers(1, 60), junk=st.binary(min_size=1, max_size=40))
def test_other_bytes_are_refused(cut: int, junk: bytes) -> None:
    batch = build_batch([Record(offset=each, timestamp_ms=1, key=b"k" * 9, value=b"v" * 9) for each in range(3)])
    header = read_header(batch)
    body = batch_body(batch, header)
    with pytest.raises(Corrupt):
        record_spans(body[: -min(cut, len(body))], header)
    with pytest.raises(Corrupt):
        record_spans(body + junk, header)
