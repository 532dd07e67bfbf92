"""The end of a segment: the footer (a msgpack map) and the fixed trailer that locates it.

The footer makes a segment self-describing: topic and partition, position and hash of each block, and the leader epochs, aborted
transactions and producer states that a reader or a new owner needs. A footer that parses is consistent: its blocks tile the
data without gap or overlap, their offsets are contiguous, and their leaf hashes give the Merkle root.

Packs and checks bytes; reads and writes no object. Format: ``docs/reference/formats/segment.md``.
"""

from __future__ import annotations

import struct
from typing import Final
from uuid import UUID

import msgspec
from crc32c import crc32c

from stratalog_core.batches.checkpoint import EpochStart, ProducerEntry
from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer
from stratalog_core.stepwise import decode_map
from stratalog_tiering.format.merkle import HASH_BYTES, root_hash

FORMAT_VERSION: Final = 1
MAGIC: Final = b"SLSEGMNT"
NONE: Final = "none"
"""The only block compression and encryption of format version 1."""

_TRAILER: Final = struct.Struct(">QIIHHI8s")
_TRAILER_CRC_START: Final = 20
TRAILER_BYTES: Final = _TRAILER.size
TAIL_GUESS_BYTES: Final = 64 * 1024
"""Size of a first read from the end of an object when the footer's length is unknown; nearly always enough."""


class BlockEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One block: whole batches, ``length`` bytes from ``position`` on. ``last_offset`` is inclusive.

    ``max_timestamp_ms`` is the maximum of the batch headers' (timestamps are not monotonic), ``leaf_hash`` the block's RFC 9162
    leaf. Stored as an array: the order of the fields is permanent, new fields are appended.
    """

    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    position: int
    length: int
    crc: int
    record_count: int
    batch_count: int
    leaf_hash: bytes

    @property
    def end_position(self) -> int:
        return self.position + self.length


class AbortedTransaction(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A producer's records from ``first_offset`` to ``last_offset`` (its abort marker) were aborted."""

    producer_id: int
    first_offset: int
    last_offset: int


class SegmentFooter(msgspec.Struct, frozen=True, kw_only=True):
    """The whole footer. Offsets: ``base_offset`` inclusive, ``end_offset`` exclusive.

    ``leader_epochs`` is the known part of the partition's history up to ``end_offset``, so it may begin below ``base_offset``.
    ``aborted_transactions`` lists all that overlap the segment; it is complete, because only decided transactions are
    offloaded. ``producers`` is the state after the last record, in the arrays of checkpoints. ``first_timestamp_min_ms`` is
    the minimum over the first records of the batches: informative, not a lower bound for all records.
    """

    format_version: int
    topic_id: UUID
    topic_name: str
    partition: int
    base_offset: int
    end_offset: int
    ledger_ids: tuple[int, ...]
    blocks: tuple[BlockEntry, ...]
    leader_epochs: tuple[EpochStart, ...]
    aborted_transactions: tuple[AbortedTransaction, ...]
    producers: tuple[ProducerEntry, ...]
    record_count: int
    batch_count: int
    data_bytes: int
    max_timestamp_ms: int
    first_timestamp_min_ms: int
    merkle_root: bytes
    created_at_ms: int
    block_compression: str = NONE
    block_encryption: str = NONE


def encode_footer(footer: SegmentFooter) -> bytes:
    """Footer and trailer as bytes, to be written directly after the last block. Raises ``Corrupt`` as `check_footer`."""
    check_footer(footer, footer.data_bytes)
    body = msgspec.msgpack.encode(footer)
    head = _TRAILER.pack(footer.data_bytes, len(body), crc32c(body), FORMAT_VERSION, 0, 0, MAGIC)
    trailer_crc = crc32c(head[:_TRAILER_CRC_START])
    return body + head[:_TRAILER_CRC_START] + trailer_crc.to_bytes(4, "big") + MAGIC


def footer_range(tail: Buffer, object_bytes: int) -> tuple[int, int]:
    """``(position, length)`` of footer and trailer together, from an object's last 32 or more bytes.

    Raises ``Corrupt``, or ``Invalid`` for an unknown format version.
    """
    position, length, _ = _read_trailer(tail, object_bytes)
    return position, length + TRAILER_BYTES


def parse_footer(tail: Buffer, object_bytes: int) -> SegmentFooter:
    """The footer in an object's last bytes; ``tail`` must include the footer's start (:func:`footer_range`).

    Raises ``Corrupt`` that names the mismatch, or ``Invalid`` for an unknown format version or a ``tail`` that is too short.
    """
    position, length, crc = _read_trailer(tail, object_bytes)
    start = len(tail) - TRAILER_BYTES - length
    if start < 0:
        raise Invalid(f"the last {len(tail)} bytes do not hold the whole footer; it needs {length + TRAILER_BYTES}")
    body = memoryview(tail)[start : start + length]
    if crc32c(body) != crc:
        raise Corrupt(f"segment footer at byte {position} does not match its CRC", position=position, length=length)
    try:
        footer = decode_map(body, SegmentFooter, {"blocks": BlockEntry, "producers": ProducerEntry})
    except MALFORMED as bad:
        raise Corrupt(f"segment footer at byte {position} cannot be decoded: {bad}") from bad
    check_footer(footer, position)
    return footer


def _read_trailer(tail: Buffer, object_bytes: int) -> tuple[int, int, int]:
    if len(tail) < TRAILER_BYTES or object_bytes < len(tail):
        raise Corrupt(f"segment of {object_bytes} bytes is too short for its trailer of {TRAILER_BYTES}")
    trailer = bytes(memoryview(tail)[len(tail) - TRAILER_BYTES :])
    position, length, crc, version, _, trailer_crc, magic = _TRAILER.unpack(trailer)
    if magic != MAGIC:
        raise Corrupt("the object does not end with a segment's magic: it is truncated or not a segment")
    if crc32c(trailer[:_TRAILER_CRC_START]) != trailer_crc:
        raise Corrupt("segment trailer does not match its CRC")
    if version != FORMAT_VERSION:
        raise Invalid(f"segment format version {version} is unknown; this release reads {FORMAT_VERSION}: upgrade it")
    if position + length + TRAILER_BYTES != object_bytes:
        raise Corrupt(f"segment trailer locates a footer of {length} bytes at {position} in an object of {object_bytes}")
    return position, length, crc


def check_footer(footer: SegmentFooter, data_bytes: int) -> None:
    """Raise ``Corrupt`` unless the footer agrees with itself and with ``data_bytes`` of blocks before it."""
    position, offset, records, batches = 0, footer.base_offset, 0, 0
    for index, block in enumerate(footer.blocks):
        _check_block_entry(index, block, position, offset)
        position, offset = block.end_position, block.last_offset + 1
        records, batches = records + block.record_count, batches + block.batch_count
    found = (position, position, offset, records, batches)
    if found != (data_bytes, footer.data_bytes, footer.end_offset, footer.record_count, footer.batch_count):
        raise Corrupt(f"segment footer's totals differ from its blocks' bytes, end offset, records and batches {found[1:]}")
    if footer.max_timestamp_ms != max((block.max_timestamp_ms for block in footer.blocks), default=-1):
        raise Corrupt("segment footer's maximum timestamp is not that of its blocks")
    if root_hash([block.leaf_hash for block in footer.blocks]) != footer.merkle_root:
        raise Corrupt("segment footer's Merkle root is not that of its blocks")
    if (footer.block_compression, footer.block_encryption) != (NONE, NONE):
        raise Invalid(f"segment uses {footer.block_compression}/{footer.block_encryption}; this release reads none/none")


def _check_block_entry(index: int, block: BlockEntry, position: int, offset: int) -> None:
    if block.position != position or block.length <= 0:
        raise Corrupt(f"block {index} covers {block.length} bytes from position {block.position}; expected {position}")
    if block.base_offset != offset or block.last_offset < offset:
        raise Corrupt(f"block {index} holds offsets {block.base_offset}..{block.last_offset}; expected them from {offset}")
    if len(block.leaf_hash) != HASH_BYTES:
        raise Corrupt(f"block {index} has a leaf hash of {len(block.leaf_hash)} bytes")
