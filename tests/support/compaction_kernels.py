"""Loads the compiled code of compaction ahead of time: two seconds, and six where it has to be compiled first."""

from __future__ import annotations

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.records import Record, build_batch


def load_kernels() -> None:
    """Compact one batch, so that nobody waits for the code later."""
    from stratalog_tiering.core.compaction import MapBuilder
    from stratalog_tiering.core.offset_map import OffsetMap

    records = [Record(offset=offset, timestamp_ms=0, key=b"", value=None if offset else b"") for offset in range(2)]
    batch = build_batch(records)
    builder = MapBuilder(OffsetMap(2, b""), 0)
    builder.add(batch, read_header(batch))
    builder.filter(0, 0, (), b"expires").filter(batch, read_header(batch), is_last=True)
