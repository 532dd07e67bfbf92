"""The expiry of a record is what its last header of the name says, in the raw bytes and for the plain decoder alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.record_expiry import expiry_ms, expiry_of
from stratalog_core.batches.record_spans import batch_body, record_spans
from stratalog_core.batches.records import Record, build_batch

NAME = "expires"
values = st.none() | st.binary(max_size=4) | st.integers(0, 2**62).map(lambda number: b"%d" % number)
headers = st.lists(st.tuples(st.sampled_from([NAME, "expire", "expires2", ""]), values), max_size=4)
fields = st.none() | st.binary(max_size=200) | st.just(NAME.encode())


@given(st.lists(st.tuples(fields, fields, headers), min_size=1, max_size=8))
def test_the_last_header_of_the_name_counts(
    rows: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]],
) -> None:
    records = [
        Record(offset=at, timestamp_ms=1, key=key, value=value, headers=tuple(found))
        for at, (key, value, found) in enumerate(rows)
    ]
    batch = build_batch(records)
    header = read_header(batch)
    body = batch_body(batch, header)
    for span, record in zip(record_spans(body, header), records, strict=True):
        named = [value for name, value in record.headers if name == NAME]
        assert expiry_ms(body, span, NAME.encode()) == (expiry_of(named[-1]) if named else None)


@pytest.mark.parametrize(
    ("value", "at_ms"),
    [(b"0", 0), (b"1700000000000", 1_700_000_000_000), (b"", None), (b"-1", None), (b"9" * 20, None), (None, None)],
)
def test_only_decimal_text_is_a_time(value: bytes | None, at_ms: int | None) -> None:
    assert expiry_of(value) == at_ms


@given(st.integers(0, 60), st.binary(min_size=1, max_size=3))
def test_headers_that_cannot_be_read_raise_nothing(position: int, junk: bytes) -> None:
    batch = build_batch([Record(offset=0, timestamp_ms=1, key=b"k", value=b"v" * 20, headers=((NAME, b"5"), ("x", b"y")))])
    header = read_header(batch)
    body = batch_body(batch, header)
    (span,) = record_spans(body, header)
    value_end = body.index(b"v" * 20) + 20
    damaged = body[: value_end + position % 15] + junk + body[value_end + position % 15 + len(junk) :]
    found = expiry_ms(damaged[: len(body)], span, NAME.encode())
    assert found is None or found >= 0
