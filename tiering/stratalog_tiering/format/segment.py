"""The segment object: a partition's record batches cut into blocks, then sections, footer and trailer.

The first ``data_bytes`` of the object are the blocks back to back and nothing else. A block is a run of whole batches of about
``block_bytes_target`` bytes (one larger batch makes a larger block) and the unit of every ranged read: it has a CRC32C, and a
Merkle root over its batches, each of which is a leaf. Offsets are contiguous from the first batch to the last, unless the
segment is compacted; then batches and records may be missing, but never the last batch, although it may have lost its records.

A block is stored as its batches are, or as one zstd frame, and is encrypted if the segment has a data key. :func:`plain_block`
is the only place where stored bytes become batches: everything that reads blocks goes through it.

Batches in, byte parts out; bytes in, ``Corrupt`` out. Decodes no record and does no I/O. Format:
``docs/reference/formats/segment.md``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec
import zstandard
from crc32c import crc32c

from stratalog_core.batches.batch import MAGIC as BATCH_MAGIC
from stratalog_core.batches.batch import BatchHeader, crc_matches, iterate_headers, read_header
from stratalog_core.batches.checkpoint import EpochStart, ProducerEntry
from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.ports import Buffer
from stratalog_tiering.format.block_cipher import BlockCipher, SegmentEncryption
from stratalog_tiering.format.erased_leaves import ErasedLeaf, encode_erased
from stratalog_tiering.format.footer import (
    AES_256_GCM,
    ERASED,
    FORMAT_VERSION,
    MUST_UNDERSTAND,
    NONE,
    PRODUCERS,
    ZSTD,
    AbortedTransaction,
    BlockEntry,
    SectionEntry,
    SegmentFooter,
    describe_section,
    encode_footer,
    encode_producers,
    lowest,
    parse_footer,
)
from stratalog_tiering.format.merkle import TreeFrontier, batch_leaf
from stratalog_tiering.format.open_block import OpenBlock

BLOCK_BYTES_TARGET: Final = 1024 * 1024
COMPRESSED_SHARE_MAX: Final = 15 / 16
"""A block that compresses less is stored as it is, so that reading batches which producers compressed costs no second pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentIdentity:
    """The partition and the ledgers whose records a segment holds, and its first offset."""

    cluster_id: str
    topic_id: UUID
    topic_name: str
    partition: int
    base_offset: int
    ledger_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSegment:
    """A finished segment: its footer, and what its manifest entry needs beside it. Positions and lengths are in stored bytes.

    ``footer_sha256`` is over ``footer_length`` bytes from ``footer_position`` on, ``sha256`` over the whole object.
    ``leader_epochs`` are those of the batches. ``leaves`` holds the Merkle leaves, one per record batch in offset
    order, ``HASH_BYTES`` each.
    """

    footer: SegmentFooter
    footer_position: int
    footer_length: int
    footer_sha256: bytes
    object_bytes: int
    sha256: bytes
    leader_epochs: tuple[EpochStart, ...]
    leaves: bytes

    @property
    def min_timestamp_ms(self) -> int | None:
        return self.footer.min_timestamp_ms


class SegmentWriter:
    """Turns batches into a segment's bytes. Call ``append`` and ``take_parts`` in turn, then ``finish``.

    It keeps only the index and the parts that ``take_parts`` has not returned yet. Buffers are passed on, not copied: they must
    not change until the parts are written. With ``zstd_level`` or ``encryption``, a block's batches are kept until the block is
    full, and compressed and encrypted by the call that closes it. ``is_compacted``: offsets may be left out before a batch.
    """

    def __init__(
        self,
        identity: SegmentIdentity,
        block_bytes_target: int = BLOCK_BYTES_TARGET,
        zstd_level: int | None = None,
        encryption: SegmentEncryption | None = None,
        *,
        is_compacted: bool = False,
    ) -> None:
        if block_bytes_target <= 0:
            raise Invalid(f"block_bytes_target is {block_bytes_target}; minimum is 1")
        self._identity = identity
        self._block_bytes_target = block_bytes_target
        self._compressor = None if zstd_level is None else zstandard.ZstdCompressor(level=zstd_level)
        self._encryption = encryption
        self._is_compacted = is_compacted
        self._first_batch_offset = -1
        self._kept: list[Buffer] = []
        self._parts: list[Buffer] = []
        self._blocks: list[BlockEntry] = []
        self._next_offset = identity.base_offset
        self._data_bytes = 0
        self._open = OpenBlock(0, identity.base_offset)
        self._epochs: list[EpochStart] = []
        self._first_timestamp_min_ms = -1
        self._sha256 = hashlib.sha256()
        self._leaves = bytearray()

    @property
    def next_offset(self) -> int:
        """The base offset that the next batch must have, or must not be below in a compacted segment."""
        return self._next_offset

    @property
    def first_batch_offset(self) -> int:
        """Base offset of the first batch; -1 without any."""
        return self._first_batch_offset

    @property
    def leader_epochs(self) -> tuple[EpochStart, ...]:
        """Epochs of the appended batches, each with the offset at which it begins in this segment."""
        return tuple(self._epochs)

    def append(self, batch: Buffer, header: BatchHeader | None = None) -> None:
        """Add one whole batch. Raises ``Corrupt`` if it does not continue the offsets or is not one whole batch."""
        header = header or read_header(batch)
        if header.size_bytes != len(batch) or header.magic != BATCH_MAGIC:
            raise Corrupt(
                f"not exactly one batch of format v2: its header says {header.size_bytes} bytes, the buffer has {len(batch)}"
            )
        is_next = header.base_offset == self._next_offset or (self._is_compacted and header.base_offset > self._next_offset)
        if not is_next or header.last_offset_delta < 0:
            raise Corrupt(
                f"batch at offsets {header.base_offset}..{header.last_offset} does not continue at {self._next_offset}",
                expected=self._next_offset,
                found=header.base_offset,
            )
        if self._open.length and self._open.length + len(batch) > self._block_bytes_target:
            self._close_block()
        leaf = batch_leaf(batch)
        self._open.add(batch, header, leaf)
        self._leaves += leaf
        if self._compressor is None and self._encryption is None:
            self._write(batch)
        else:
            self._kept.append(batch)
        self._note_epoch(header)
        self._note_first_timestamp(header)
        self._next_offset = header.next_offset

    def take_parts(self) -> list[Buffer]:
        """The parts that have become ready since the last call, in order."""
        parts, self._parts = self._parts, []
        return parts

    def finish(
        self,
        *,
        created_at_ms: int,
        leader_epochs: Sequence[EpochStart] = (),
        aborted_transactions: Sequence[AbortedTransaction] = (),
        producers: Sequence[ProducerEntry] = (),
        erased: Sequence[ErasedLeaf] = (),
    ) -> WrittenSegment:
        """Close the last block and append sections, footer and trailer. Raises ``Invalid`` if there is no batch.

        ``leader_epochs`` defaults to those seen in the batches. ``erased`` are the leaves of batches that lost records.
        """
        if not self._leaves:
            raise Invalid("a segment needs at least one batch")
        self._close_block()
        identity, blocks = self._identity, tuple(self._blocks)
        footer = SegmentFooter(
            format_version=FORMAT_VERSION,
            cluster_id=identity.cluster_id,
            topic_id=identity.topic_id,
            topic_name=identity.topic_name,
            partition=identity.partition,
            base_offset=identity.base_offset,
            end_offset=self._next_offset,
            ledger_ids=identity.ledger_ids,
            blocks=blocks,
            leader_epochs=tuple(leader_epochs) or self.leader_epochs,
            aborted_transactions=tuple(aborted_transactions),
            sections=self._write_sections(producers, erased),
            record_count=sum(block.record_count for block in blocks),
            batch_count=sum(block.batch_count for block in blocks),
            data_bytes=self._data_bytes,
            min_timestamp_ms=lowest([block.min_timestamp_ms for block in blocks]),
            max_timestamp_ms=max(block.max_timestamp_ms for block in blocks),
            first_timestamp_min_ms=self._first_timestamp_min_ms,
            created_at_ms=created_at_ms,
            block_compression=NONE if self._compressor is None else ZSTD,
            block_encryption=NONE if self._encryption is None else AES_256_GCM,
            data_key="" if self._encryption is None else self._encryption.data_key,
            compacted=True if self._is_compacted else msgspec.UNSET,
        )
        tail = encode_footer(footer)
        self._write(tail)
        return WrittenSegment(
            footer=footer,
            footer_position=footer.position,
            footer_length=len(tail),
            footer_sha256=hashlib.sha256(tail).digest(),
            object_bytes=footer.position + len(tail),
            sha256=self._sha256.digest(),
            leader_epochs=self.leader_epochs,
            leaves=bytes(self._leaves),
        )

    def _write(self, part: Buffer) -> None:
        self._parts.append(part)
        self._sha256.update(part)

    def _write_sections(self, producers: Sequence[ProducerEntry], erased: Sequence[ErasedLeaf]) -> tuple[SectionEntry, ...]:
        sections: list[SectionEntry] = []
        if producers:
            sections.append(self._write_section(PRODUCERS, encode_producers(producers), self._data_bytes))
        if erased:
            position = sections[-1].end_position if sections else self._data_bytes
            sections.append(self._write_section(ERASED, encode_erased(erased), position, MUST_UNDERSTAND))
        return tuple(sections)

    def _write_section(self, name: str, content: bytes, position: int, flags: int = 0) -> SectionEntry:
        self._write(content)
        return describe_section(name, content, position, flags)

    def _close_block(self) -> None:
        block = self._open.entry()
        if self._kept:
            block = self._write_kept(block)
        self._blocks.append(block)
        self._data_bytes = block.end_position
        self._open = OpenBlock(self._data_bytes, self._next_offset)

    def _write_kept(self, block: BlockEntry) -> BlockEntry:
        """Write the open block's batches, as one zstd frame if that is worth it, and encrypted; returns the block's entry."""
        batches, self._kept = self._kept, []
        content: Sequence[Buffer] = batches
        if self._compressor is not None:
            frame = self._compressor.compress(b"".join(batches))
            if len(frame) <= block.plain_length * COMPRESSED_SHARE_MAX:
                content = [frame]
        nonce = b""
        if self._encryption is not None:
            nonce, stored = self._encryption.cipher.encrypt(
                len(self._blocks), b"".join(content), block.base_offset, block.last_offset, block.plain_length
            )
            content = [stored]
        for part in content:
            self._write(part)
        if content is batches:
            return block
        return msgspec.structs.replace(block, length=len(content[0]), crc=crc32c(content[0]), nonce=nonce)

    def _note_epoch(self, header: BatchHeader) -> None:
        if not self._epochs or self._epochs[-1].epoch != header.leader_epoch:
            self._epochs.append(EpochStart(epoch=header.leader_epoch, start_offset=header.base_offset))

    def _note_first_timestamp(self, header: BatchHeader) -> None:
        is_first = self._first_batch_offset < 0
        if is_first:
            self._first_batch_offset = header.base_offset
        first_ms = header.base_timestamp_ms if header.delete_horizon_ms is None else header.max_timestamp_ms
        if is_first or first_ms < self._first_timestamp_min_ms:
            self._first_timestamp_min_ms = first_ms


def _check_stored(stored: Buffer, entry: BlockEntry) -> None:
    """Raise ``Corrupt`` unless the bytes are exactly the block's, by length and CRC32C."""
    if len(stored) != entry.length:
        raise Corrupt(
            f"block of offsets {entry.base_offset}..{entry.last_offset} has {len(stored)} bytes, not {entry.length}",
            base_offset=entry.base_offset,
            last_offset=entry.last_offset,
        )
    if crc32c(stored) != entry.crc:
        raise Corrupt(
            f"block of offsets {entry.base_offset}..{entry.last_offset} does not match its CRC",
            base_offset=entry.base_offset,
            last_offset=entry.last_offset,
        )


def plain_block(stored: Buffer, entry: BlockEntry, cipher: BlockCipher | None = None) -> memoryview:
    """The block's batches, from its stored bytes: ``stored`` itself unless the block is compressed or encrypted.

    ``cipher`` is that of the segment, needed for an encrypted block. Raises ``Corrupt`` unless the bytes are exactly the
    block's, decrypt, and decompress to exactly ``plain_length`` bytes. Allocates no more than that for each of the two.
    """
    _check_stored(stored, entry)
    if entry.is_encrypted:
        assert cipher is not None, "the caller has the cipher of an encrypted segment"
        stored = cipher.decrypt(entry.nonce, stored, entry.base_offset, entry.last_offset, entry.plain_length)
    if not entry.is_compressed:
        return memoryview(stored)
    try:
        # The decompressor allocates the size that the frame claims.
        claimed = zstandard.get_frame_parameters(stored).content_size
        if claimed != entry.plain_length:
            raise Corrupt(f"its zstd frame claims {claimed} bytes, its entry {entry.plain_length}")
        return memoryview(zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False))
    except (zstandard.ZstdError, Corrupt) as bad:
        raise Corrupt(f"block of offsets {entry.base_offset}..{entry.last_offset} does not decompress: {bad}") from bad


OnBatch = Callable[[BatchHeader, bytes], None]
"""Takes a batch's header and its Merkle leaf."""


def audit_block(
    stored: Buffer,
    entry: BlockEntry,
    on_batch: OnBatch | None = None,
    cipher: BlockCipher | None = None,
    *,
    is_compacted: bool = False,
) -> memoryview:
    """The block's batches, from its stored bytes, which are verified completely. Raises ``Corrupt``. ``cipher``: `plain_block`.

    Verified are CRC, Merkle leaves, each batch's own CRC, contiguous offsets (in a compacted segment: ascending ones), and
    counts. ``on_batch`` receives each batch that is sound by itself, before the block is known to be sound.
    """
    block = plain_block(stored, entry, cipher)
    offset, records, leaves = entry.base_offset, 0, TreeFrontier()
    for batch, header in iterate_block_batches(block):
        if header.base_offset != offset and not (is_compacted and header.base_offset > offset):
            raise Corrupt(f"batch begins at offset {header.base_offset}; expected {offset}")
        if not crc_matches(batch, header):
            raise Corrupt(f"batch of offsets {header.base_offset}..{header.last_offset} does not match its CRC")
        leaf = batch_leaf(batch)
        leaves.append(leaf)
        if on_batch is not None:
            on_batch(header, leaf)
        offset, records = header.next_offset, records + header.record_count
    if (offset - 1, records, leaves.size) != (entry.last_offset, entry.record_count, entry.batch_count):
        raise Corrupt(f"block of offsets {entry.base_offset}..{entry.last_offset} holds {records} records up to {offset - 1}")
    if leaves.root() != entry.leaves_root:
        raise Corrupt(f"block of offsets {entry.base_offset}..{entry.last_offset} does not match its Merkle leaves")
    return block


def iterate_block_batches(block: Buffer) -> Iterator[tuple[memoryview, BatchHeader]]:
    """``(batch, header)`` of each batch in a plain block, in order. Raises ``Corrupt`` at a bad length."""
    view = memoryview(block)
    for position, header in iterate_headers(view):
        yield view[position : position + header.size_bytes], header


def find_block(blocks: Sequence[BlockEntry], offset: int) -> int:
    """Index of the block that holds ``offset``, or the first batch after it if it was compacted away.

    Raises ``IndexError`` outside the segment.
    """
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high) // 2
        if blocks[middle].last_offset < offset:
            low = middle + 1
        else:
            high = middle
    if low == len(blocks) or offset < blocks[low].base_offset:
        raise IndexError(f"offset {offset} is in none of {len(blocks)} blocks")
    return low


__all__ = [
    "BLOCK_BYTES_TARGET",
    "AbortedTransaction",
    "BlockEntry",
    "EpochStart",
    "ProducerEntry",
    "SegmentEncryption",
    "SegmentFooter",
    "SegmentIdentity",
    "SegmentWriter",
    "WrittenSegment",
    "audit_block",
    "find_block",
    "iterate_block_batches",
    "parse_footer",
    "plain_block",
]  # fmt: skip
