"""Measures compaction on one core, without a store: bytes of batches that are mapped and filtered per second.

Each record is one of ten versions of its key, so a pass reads everything twice and keeps a tenth. Prints a line for each value
size and codec. Run it with ``python benchmarks/compaction.py``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import NamedTuple

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import Record, build_batch
from stratalog_tiering.core.compaction import BatchFilter, MapBuilder
from stratalog_tiering.core.offset_map import OffsetMap

_BATCH_BYTES = 64 * 1024
_TOTAL_BYTES = 32 * 1024 * 1024
_VERSIONS = 10


def history(value_bytes: int, codec: int) -> Iterator[bytes]:
    """Batches of ``_TOTAL_BYTES`` before compression, with keys of 20 bytes."""
    chance = random.Random(1)
    value = bytes(chance.randbytes(value_bytes // 2)) + bytes(value_bytes - value_bytes // 2)
    per_batch = max(1, _BATCH_BYTES // (value_bytes + 30))
    total = _TOTAL_BYTES // (value_bytes + 30)
    keys = max(1, total // _VERSIONS)
    for first in range(0, total, per_batch):
        records = [
            Record(offset=first + step, timestamp_ms=first, key=b"%020d" % chance.randrange(keys), value=value)
            for step in range(per_batch)
        ]
        yield bytes(build_batch(records, compression=codec))


class Measured(NamedTuple):
    """Processor seconds of the steps, over ``records`` records of ``plain_bytes``."""

    records: int
    plain_bytes: int
    stored_bytes: int
    map_s: float
    filter_s: float
    check_s: float

    @property
    def total_s(self) -> float:
        return self.map_s + self.filter_s + self.check_s


def measured(value_bytes: int, codec: int) -> Measured:
    batches = [(batch, read_header(batch)) for batch in history(value_bytes, codec)]
    records = sum(header.record_count for _, header in batches)
    started = time.process_time()
    builder = MapBuilder(OffsetMap(10_000_000, b"secret"), 0)
    for batch, header in batches:
        builder.add(batch, header)
    mapped = time.process_time()
    keep = BatchFilter(builder.offsets, builder.end_offset, 1, 1)
    kept = [filtered.batch for batch, header in batches if (filtered := keep.filter(batch, header, is_last=False)).batch]
    filtered_at = time.process_time()
    for survivor in kept:
        keep.fingerprint(survivor, read_header(survivor))
    return Measured(
        records=records,
        plain_bytes=records * (value_bytes + 30),
        stored_bytes=sum(len(batch) for batch, _ in batches),
        map_s=mapped - started,
        filter_s=filtered_at - mapped,
        check_s=time.process_time() - filtered_at,
    )


def _row(value_bytes: int, codec_name: str) -> str:
    found = measured(value_bytes, NAMES[codec_name])
    rate = found.plain_bytes / found.total_s / 1e6
    parts = f"map {found.map_s:.2f} s, filter {found.filter_s:.2f} s, check {found.check_s:.2f} s"
    return f"| {value_bytes} | {codec_name} | {rate:.0f} | {found.stored_bytes / 1e6:.0f} | {found.records} | {parts} |"


if __name__ == "__main__":
    measured(10_000, NAMES["none"])  # loads the kernels
    print("| value bytes | codec | MB/s of records | MB stored | records | processor time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for value_size in (100, 1_000, 10_000):
        for name in ("none", "lz4", "zstd"):
            print(_row(value_size, name))
