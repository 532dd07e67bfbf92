"""Reads blocks of segments with ranged requests and checks each block before it is used.

Every mismatch raises ``Corrupt`` with segment, block and offsets; none is left out unless the caller takes the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from stratalog_core.errors import Corrupt
from stratalog_pipeline.bucket import Bucket, Range
from stratalog_pipeline.planning import OffsetRange, SegmentSlice
from stratalog_pipeline.pruning import ANY_TIME, TimeRange
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.footer import BlockEntry, SegmentFooter
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.segment import plain_block
from stratalog_tiering.store import ObjectStore

REQUEST_BYTES: Final = 8 * 1024 * 1024
"""Adjacent blocks are fetched together up to this size; a single larger block makes a larger request."""


def wanted_blocks(
    footer: SegmentFooter, piece: SegmentSlice, offsets: OffsetRange, times: TimeRange = ANY_TIME
) -> list[BlockEntry]:
    """Return the blocks of a footer that begin within ``piece`` and can hold a wanted record."""
    return [
        block
        for block in footer.blocks
        if piece.blocks_from <= block.base_offset < piece.blocks_end
        and block.last_offset >= offsets.first
        and block.base_offset < offsets.end
        and times.may_hold(block.min_timestamp_ms, block.max_timestamp_ms)
    ]


def read_blocks(
    bucket: Bucket,
    entry: SegmentEntry,
    footer: SegmentFooter,
    blocks: Sequence[BlockEntry],
    on_corrupt: Callable[[Corrupt], None] | None = None,
) -> Iterator[tuple[BlockEntry, memoryview]]:
    """Yield each block of ``blocks``, which are some of the footer's, and its batches, checked and in order.

    Raises ``Corrupt`` with segment, block and offsets, and ``StorageFailed`` if the key of an encrypted segment is not there.
    With ``on_corrupt`` it gets the error of a damaged block, and the block is left out as a whole: the CRCs of its batches do
    not cover their offsets.
    """
    cipher = bucket.cipher(footer) if blocks else None
    runs = requested_together(blocks)
    for run, content in zip(runs, bucket.get_ranges(range_of(entry, run) for run in runs), strict=True):
        for block, stored in parts_of(run, content):
            try:
                plain = _plain(bucket, entry, block, stored, cipher)
            except Corrupt as bad:
                if on_corrupt is None:
                    raise
                on_corrupt(bad)
            else:
                yield block, plain


def _plain(
    bucket: Bucket, entry: SegmentEntry, block: BlockEntry, stored: memoryview, cipher: BlockCipher | None
) -> memoryview:
    try:
        return plain_block(stored, block, cipher)
    except Corrupt as bad:
        if not bucket.has_second_copy:
            raise located(entry, block, bad) from bad

    async def read(store: ObjectStore) -> memoryview:
        position = entry.data_position + block.position
        try:
            return plain_block(await store.get_range(entry.key, position, block.length), block, cipher)
        except Corrupt as bad:
            raise located(entry, block, bad) from bad

    return bucket.read_verified(read)


def located(entry: SegmentEntry, block: BlockEntry, bad: Corrupt) -> Corrupt:
    """Return ``bad`` with segment, block and offsets added."""
    place = f"segment {entry.key}, block at byte {block.position}, offsets {block.base_offset}..{block.last_offset}"
    detail = {"base_offset": block.base_offset, "last_offset": block.last_offset, "position": block.position}
    return Corrupt(f"{place}: {bad.message}", segment=entry.key, **detail)


def requested_together(blocks: Sequence[BlockEntry]) -> list[list[BlockEntry]]:
    """Return runs of adjacent blocks, each of at most ``REQUEST_BYTES`` or a single block: one request reads a run."""
    runs: list[list[BlockEntry]] = []
    for block in blocks:
        run = runs[-1] if runs else []
        if run and block.position == run[-1].end_position and block.end_position - run[0].position <= REQUEST_BYTES:
            run.append(block)
        else:
            runs.append([block])
    return runs


def range_of(entry: SegmentEntry, run: Sequence[BlockEntry]) -> Range:
    """Return the range of the segment's object that holds a run of adjacent blocks."""
    return entry.key, entry.data_position + run[0].position, run[-1].end_position - run[0].position


def parts_of(run: Sequence[BlockEntry], content: memoryview) -> Iterator[tuple[BlockEntry, memoryview]]:
    """Yield each block of a run with its stored bytes."""
    for block in run:
        start = block.position - run[0].position
        yield block, content[start : start + block.length]
