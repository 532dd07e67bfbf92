"""Removes the rows of records that have expired by a header (``stratalog_core.batches.record_expiry``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stratalog_core.batches.record_expiry import expiry_of

_HEADERS: Final = "headers"


def with_headers(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns to read: those given, and the headers, which hold the expiry."""
    return tuple(columns) if _HEADERS in columns else (*columns, _HEADERS)


def unexpired(
    batches: Iterable[pa.RecordBatch], columns: Sequence[str], header_name: str, now_ms: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that have not expired at ``now_ms``, with ``columns``. The batches have :func:`with_headers` of these."""
    for batch in batches:
        expired = _expired_rows(batch.column(_HEADERS), header_name, now_ms)
        if expired:
            stays = np.ones(batch.num_rows, np.bool_)
            stays[expired] = False
            batch = batch.filter(pa.array(stays))
        if batch.num_rows:
            yield batch.select(list(columns))


def _expired_rows(headers: pa.ListArray, header_name: str, now_ms: int) -> list[int]:
    """The numbers of the rows that have expired. The last header of the name counts."""
    fields = headers.flatten()
    named = np.flatnonzero(pc.fill_null(pc.equal(fields.field("key"), header_name), False).to_numpy(zero_copy_only=False))
    if not named.size:
        return []
    rows = pc.list_parent_indices(headers).to_numpy()[named]
    is_last = np.append(rows[1:] != rows[:-1], True)
    values = fields.field("value").take(pa.array(named[is_last])).to_pylist()
    return [
        int(row)
        for row, value in zip(rows[is_last], values, strict=True)
        if (at_ms := expiry_of(value)) is not None and at_ms <= now_ms
    ]
