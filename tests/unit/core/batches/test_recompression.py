"""A batch with another codec has the same records, offsets, times and producer, a sound checksum, and a bounded size."""

from __future__ import annotations

import lz4.frame
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.batches.batch import HEADER_BYTES, TRANSACTIONAL_BIT, check_batch, read_header
from stratalog_core.batches.compression import GZIP, LZ4, NAMES, NONE, PIECE_BYTES, ZSTD
from stratalog_core.batches.recompression import Codec, recompressed
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.errors import Corrupt, Unavailable

CODECS = tuple(NAMES.values())
UNLIMITED = 1 << 30
levels = st.sampled_from(
    [Codec(codec) for codec in CODECS] + [Codec(GZIP, 9), Codec(LZ4, 17), Codec(ZSTD, -5), Codec(ZSTD, 12)]
)
rows = st.lists(st.tuples(st.integers(0, 10_000), st.none() | st.binary(max_size=20), st.binary(max_size=300)), min_size=1)


def batch_of(values: list[bytes], codec: int) -> bytearray:
    return build_batch(
        [Record(offset=at, timestamp_ms=5, key=None, value=each) for at, each in enumerate(values)], compression=codec
    )


@settings(deadline=None, max_examples=40)
@given(rows, st.sampled_from(CODECS), levels)
def test_only_codec_length_and_checksum_change(
    written: list[tuple[int, bytes | None, bytes]], source: int, target: Codec
) -> None:
    records = [Record(offset=7 + at, timestamp_ms=time, key=key, value=value) for at, (time, key, value) in enumerate(written)]
    batch = build_batch(
        records,
        compression=source,
        attributes=TRANSACTIONAL_BIT,
        leader_epoch=3,
        producer_id=9,
        producer_epoch=2,
        base_sequence=40,
    )
    header = read_header(batch)
    found = recompressed(batch, header, target, UNLIMITED)
    assert found is not None
    changed = check_batch(found)
    assert list(iterate_records(found)) == records
    assert changed.compression == target.number
    same = {"batch_length": 0, "attributes": 0, "crc": 0}
    assert changed._replace(**same) == header._replace(**same)
    assert changed.is_transactional


def test_the_result_is_bounded_exactly() -> None:
    batch = batch_of([bytes(3 * PIECE_BYTES)], ZSTD)
    header = read_header(batch)
    whole = recompressed(batch, header, Codec(NONE), UNLIMITED)
    assert whole is not None
    assert recompressed(batch, header, Codec(NONE), len(whole)) == whole
    assert recompressed(batch, header, Codec(NONE), len(whole) - 1) is None
    assert recompressed(batch, header, Codec(LZ4), 10_000) is not None


def test_lz4_blocks_are_independent_because_java_reads_no_others() -> None:
    batch = batch_of([bytes(300_000)], NONE)
    found = recompressed(batch, read_header(batch), Codec(LZ4), UNLIMITED)
    assert found is not None
    assert not lz4.frame.get_frame_info(bytes(found[HEADER_BYTES:]))["block_linked"]


def test_a_level_changes_the_size() -> None:
    batch = batch_of([b"%d" % (number * number) for number in range(5000)], NONE)
    sizes = [len(recompressed(batch, read_header(batch), Codec(GZIP, level), UNLIMITED) or b"") for level in (1, 9)]
    assert sizes[0] > sizes[1] > HEADER_BYTES


def test_broken_records_and_unwanted_work_end_it() -> None:
    batch = batch_of([bytes(100)], ZSTD)
    header = read_header(batch)
    with pytest.raises(Unavailable):
        recompressed(batch, header, Codec(NONE), UNLIMITED, is_wanted=lambda: False)
    batch[HEADER_BYTES + 2] ^= 0xFF
    with pytest.raises(Corrupt):
        recompressed(batch, header, Codec(NONE), UNLIMITED)
    bomb = batch_of([bytes(2_000_000)], LZ4)
    with pytest.raises(Corrupt, match="limit of 100000 bytes"):
        recompressed(bomb, read_header(bomb), Codec(GZIP), UNLIMITED, memory_bytes=100_000)
