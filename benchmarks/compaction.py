"""Measures compaction on one core, without a store: bytes of batches that are mapped and filtered per second.

Each record is one of ten versions of its key, so a pass reads everything twice and keeps a tenth. Prints a line for each value
size and codec. The time for segments, which verifies all blocks that are read and hashes all that are written, is apart. Run it
with ``python -m benchmarks.compaction``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from uuid import UUID

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.ports import Buffer
from stratalog_tiering.core.compaction import BatchFilter, MapBuilder
from stratalog_tiering.core.offset_map import OffsetMap
from stratalog_tiering.format.footer import SegmentFooter
from stratalog_tiering.format.segment import SegmentIdentity, SegmentWriter, audit_block

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
    """Processor seconds of the steps, over ``records`` records of ``plain_bytes``; ``segments_s`` is not in ``total_s``."""

    records: int
    plain_bytes: int
    stored_bytes: int
    map_s: float
    filter_s: float
    check_s: float
    segments_s: float

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
    checked = time.process_time()
    return Measured(
        records=records,
        plain_bytes=records * (value_bytes + 30),
        stored_bytes=sum(len(batch) for batch, _ in batches),
        map_s=mapped - started,
        filter_s=filtered_at - mapped,
        check_s=checked - filtered_at,
        segments_s=_segments_s([batch for batch, _ in batches], kept),
    )


def _segments_s(batches: Sequence[Buffer], kept: Sequence[Buffer]) -> float:
    """Processor seconds to verify the blocks of ``batches`` twice, to write a segment of ``kept``, and to verify its blocks."""
    read = _segment(batches)
    started = time.process_time()
    _verify(*read)
    _verify(*read)
    _verify(*_segment(kept))
    return time.process_time() - started


def _segment(batches: Sequence[Buffer]) -> tuple[bytes, SegmentFooter]:
    identity = SegmentIdentity(cluster_id="", topic_id=UUID(int=1), topic_name="", partition=0, base_offset=0, ledger_ids=(1,))
    writer = SegmentWriter(identity, is_compacted=True)
    for batch in batches:
        writer.append(batch)
    footer = writer.finish(created_at_ms=0).footer
    return b"".join(writer.take_parts()), footer


def _verify(content: bytes, footer: SegmentFooter) -> None:
    for block in footer.blocks:
        audit_block(memoryview(content)[block.position : block.end_position], block, is_compacted=True)


def _row(value_bytes: int, codec_name: str) -> str:
    found = measured(value_bytes, NAMES[codec_name])
    rates = [found.plain_bytes / seconds / 1e6 for seconds in (found.total_s, found.total_s + found.segments_s)]
    parts = f"map {found.map_s:.2f} s, filter {found.filter_s:.2f} s, check {found.check_s:.2f} s"
    stored_mb = found.stored_bytes / 1e6
    return f"| {value_bytes} | {codec_name} | {rates[0]:.0f} | {rates[1]:.0f} | {stored_mb:.0f} | {found.records} | {parts} |"


if __name__ == "__main__":
    measured(10_000, NAMES["none"])  # loads the kernels
    print("| value bytes | codec | MB/s of records | with segments | MB stored | records | processor time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for value_size in (100, 1_000, 10_000):
        for name in ("none", "lz4", "zstd"):
            print(_row(value_size, name))
