"""Compressed blocks: what the writer compresses, and that a reader trusts no length and no frame."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any
from uuid import UUID

import msgspec
import pytest
import zstandard
from crc32c import crc32c

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt
from stratalog_tiering.format.footer import PLAIN_BYTES_MAX, BlockEntry, check_footer
from stratalog_tiering.format.segment import SegmentFooter, SegmentIdentity, SegmentWriter, audit_block, plain_block

TOPIC = UUID("00000000-0000-4000-8000-0000000000aa")


def batch(offset: int, value: bytes) -> bytes:
    return bytes(build_batch([Record(offset=offset, timestamp_ms=1, key=None, value=value)]))


def write(batches: list[bytes], zstd_level: int | None, block_bytes: int = 1000) -> tuple[list[bytes], SegmentFooter]:
    """The stored blocks of a segment, and its footer."""
    identity = SegmentIdentity(
        cluster_id="c", topic_id=TOPIC, topic_name="flights", partition=3, base_offset=0, ledger_ids=(7,)
    )  # fmt: skip
    writer = SegmentWriter(identity, block_bytes, zstd_level)
    for one in batches:
        writer.append(one)
    footer = writer.finish(created_at_ms=5).footer
    content = b"".join(map(bytes, writer.take_parts()))
    return [content[block.position : block.end_position] for block in footer.blocks], footer


def framed(content: bytes, **fields: Any) -> tuple[bytes, BlockEntry]:
    """A stored block with a matching CRC, and its entry, which claims ``fields``."""
    _, footer = write([batch(0, b"v" * 500)], 3)
    entry = msgspec.structs.replace(footer.blocks[0], length=len(content), crc=crc32c(content))
    return content, msgspec.structs.replace(entry, **fields)


def test_without_a_level_nothing_is_compressed_or_copied() -> None:
    batches = [batch(offset, b"v" * 500) for offset in range(4)]
    writer = SegmentWriter(
        SegmentIdentity(cluster_id="c", topic_id=TOPIC, topic_name="f", partition=0, base_offset=0, ledger_ids=())
    )  # fmt: skip
    for one in batches:
        writer.append(one)
        (part,) = writer.take_parts()
        assert part is one
    assert writer.finish(created_at_ms=5).footer.block_compression == "none"


def test_only_blocks_that_become_smaller_are_compressed() -> None:
    noise = random.Random(7).randbytes(900)
    stored, footer = write([batch(0, b"v" * 900), batch(1, noise), batch(2, b"v" * 900)], 3)
    assert footer.block_compression == "zstd"
    assert [block.is_compressed for block in footer.blocks] == [True, False, True]
    assert footer.data_bytes == sum(map(len, stored)) < 1400
    assert plain_block(stored[1], footer.blocks[1]) == batch(1, noise)


def test_the_plain_bytes_and_merkle_leaves_do_not_depend_on_compression() -> None:
    batches = [batch(offset, b"%d" % offset * 100) for offset in range(9)]
    plain, compressed = write(batches, None), write(batches, 19)
    for stored, block, as_is, other in zip(compressed[0], compressed[1].blocks, plain[0], plain[1].blocks, strict=True):
        assert audit_block(stored, block) == as_is
        assert (block.plain_length, block.leaves_root) == (other.length, other.leaves_root)


BATCH = batch(0, b"v" * 500)
FRAME = zstandard.ZstdCompressor().compress(BATCH)
SIZELESS = zstandard.ZstdCompressor(write_content_size=False).compress(BATCH)


@pytest.mark.parametrize(
    ("content", "plain_length", "message"),
    [
        (FRAME, len(BATCH) + 1, f"claims {len(BATCH)} bytes, its entry {len(BATCH) + 1}"),
        (SIZELESS, len(BATCH), "its entry"),
        (FRAME[:-5], len(BATCH), "does not decompress"),
        (FRAME + b"more", len(BATCH), "does not decompress"),
        (FRAME + FRAME, len(BATCH), "does not decompress"),
        (b"no frame", len(BATCH), "does not decompress"),
    ],
)
def test_a_frame_that_is_not_the_blocks_is_damage(content: bytes, plain_length: int, message: str) -> None:
    stored, entry = framed(content, plain_length=plain_length)
    with pytest.raises(Corrupt, match=f"block of offsets 0..0 .*{message}"):
        plain_block(stored, entry)


def test_a_truncated_block_is_damage() -> None:
    (stored,), footer = write([batch(0, b"v" * 500)], 3)
    with pytest.raises(Corrupt, match=f"has {len(stored) - 1} bytes, not {len(stored)}"):
        plain_block(stored[:-1], footer.blocks[0])


def test_nothing_is_allocated_for_a_frame_that_claims_too_much() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))
    stored, entry = framed(bomb, plain_length=500)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="claims 67108864 bytes, its entry 500"):
            plain_block(stored, entry)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


def test_blocks_that_changed_places_are_damage() -> None:
    stored, footer = write([batch(offset, b"v" * 900) for offset in range(2)], 3)
    first, second = footer.blocks
    for block, other in ((first, second), (second, first)):
        content = stored[footer.blocks.index(other)]
        moved = msgspec.structs.replace(block, length=len(content), crc=crc32c(content))
        with pytest.raises(Corrupt, match=f"batch begins at offset {other.base_offset}; expected {block.base_offset}"):
            audit_block(content, moved)


@pytest.mark.parametrize(
    ("compression", "plain_length"), [("none", 600), ("zstd", 10), ("zstd", PLAIN_BYTES_MAX + 1), ("zstd", 0)]
)
def test_a_footer_with_impossible_plain_lengths_is_damage(compression: str, plain_length: int) -> None:
    _, footer = write([batch(0, b"v" * 500)], 3)
    blocks = (msgspec.structs.replace(footer.blocks[0], plain_length=plain_length),)
    wrong = msgspec.structs.replace(footer, block_compression=compression, blocks=blocks)
    with pytest.raises(Corrupt, match=f"{plain_length} plain bytes, which block compression '{compression}' does not allow"):
        check_footer(wrong, wrong.position)
