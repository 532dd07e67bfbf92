"""Rows of expired records are left out, whatever columns are wanted; others stay as they are."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.batches.record_expiry import expiry_of
from stratalog_core.batches.records import Record, build_batch
from stratalog_pipeline.arrow.decode import decode_run
from stratalog_pipeline.arrow.expiry import unexpired, with_headers
from stratalog_pipeline.arrow.schema import COLUMNS_WITH_HEADERS, arrow_schema

pytestmark = pytest.mark.computes
NOW_MS = 1_000
values = st.none() | st.sampled_from([b"", b"999", b"1000", b"1001", b"soon"])
headers = st.lists(st.tuples(st.sampled_from(["expires", "other"]), values), max_size=3)


def read(records: list[Record], columns: tuple[str, ...]) -> list[pa.RecordBatch]:
    run = bytes(build_batch(records))
    rows = decode_run(run, topic="t", partition=0, columns=with_headers(columns))
    return list(unexpired(rows, columns, "expires", NOW_MS))


@settings(deadline=None)
@given(st.lists(headers, min_size=1, max_size=12), st.sampled_from([("offset",), ("value", "offset"), COLUMNS_WITH_HEADERS]))
def test_exactly_the_expired_rows_go(written: list[list[tuple[str, bytes | None]]], columns: tuple[str, ...]) -> None:
    records = [
        Record(offset=at, timestamp_ms=1, key=None, value=b"v", headers=tuple(found)) for at, found in enumerate(written)
    ]
    expected = []
    for record in records:
        named = [value for name, value in record.headers if name == "expires"]
        at_ms = expiry_of(named[-1]) if named else None
        if at_ms is None or at_ms > NOW_MS:
            expected.append(record.offset)
    found = read(records, columns)
    assert [offset for batch in found for offset in batch.column("offset").to_pylist()] == expected
    assert all(batch.schema.equals(arrow_schema(columns)) for batch in found)
