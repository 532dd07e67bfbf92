"""The end of a segment: optional sections, the footer (a msgpack map), signatures, and the fixed trailer that locates them.

The footer makes a segment self-describing: cluster, topic and partition, position and hashes of each block and section, and the
leader epochs and aborted transactions that a reader needs. A footer that parses is consistent: its blocks and sections tile the
bytes before it, and its offsets are contiguous.

A reader refuses everything that it must understand and does not: a format version, a flag, a block compression or encryption, a
section. It skips unknown members, other sections and signatures.

Packs and checks bytes; reads and writes no object. Format: ``docs/reference/formats/segment.md``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple
from uuid import UUID

import msgspec
from crc32c import crc32c

from stratalog_core.batches.checkpoint import EpochStart, ProducerEntry
from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer
from stratalog_core.stepwise import decode_map
from stratalog_tiering.format.block_cipher import NONCE_BYTES, TAG_BYTES
from stratalog_tiering.format.merkle import HASH_BYTES

FORMAT_VERSION: Final = 2
_PRE_RELEASE_VERSION: Final = 1
MAGIC: Final = b"SLSEGMNT"
NONE: Final = "none"
"""No block compression, or no block encryption."""
ZSTD: Final = "zstd"
"""Block compression: each block is one zstd frame, unless that would save little."""
AES_256_GCM: Final = "aes-256-gcm"
"""Block encryption (``block_cipher.py``)."""
PLAIN_BYTES_MAX: Final = 128 * 1024 * 1024
"""Maximum plain length of a compressed block. The largest blocks are single batches, which are at most 64 MiB."""
PRODUCERS: Final = "producers"
ERASED: Final = "erased"
COMPACTED: Final = 0x0001
"""Flag in the trailer: offsets between and within batches may be missing."""
MUST_UNDERSTAND: Final = 0x0001
"""Flag of a section: a reader that does not know the section's name must refuse the segment."""

_TRAILER: Final = struct.Struct(">QIIIIHHI8s")
_TRAILER_CRC_START: Final = 28
TRAILER_BYTES: Final = _TRAILER.size


class BlockEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One block: whole batches, ``length`` stored bytes from ``position`` on, with ``crc``. ``last_offset`` is inclusive.

    Timestamps are not monotonic: ``min_timestamp_ms`` and ``max_timestamp_ms`` are over all records, and the minimum is None if
    the batch headers do not tell it. ``leaves_root`` is the Merkle root over the leaves of the block's batches.
    ``plain_length`` is the length before compression and encryption; a block of another length is compressed. ``nonce`` is that
    of the encryption, which adds ``TAG_BYTES`` to the length. Stored as an array: the order of the fields is permanent, new
    fields are appended.
    """

    base_offset: int
    last_offset: int
    min_timestamp_ms: int | None
    max_timestamp_ms: int
    position: int
    length: int
    crc: int
    record_count: int
    batch_count: int
    leaves_root: bytes
    plain_length: int
    nonce: bytes = b""

    @property
    def end_position(self) -> int:
        return self.position + self.length

    @property
    def is_encrypted(self) -> bool:
        return bool(self.nonce)

    @property
    def is_compressed(self) -> bool:
        return self.length - (TAG_BYTES if self.nonce else 0) != self.plain_length

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes are the batches."""
        return not self.nonce and self.length == self.plain_length


class AbortedTransaction(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A producer's records from ``first_offset`` to ``last_offset`` (its abort marker) were aborted.

    Every transaction that ended later begins at or beyond ``last_stable_offset``, so a search can stop there.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class SectionEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An optional section between blocks and footer: ``length`` stored bytes from ``position`` on."""

    name: str
    flags: int
    position: int
    length: int
    crc: int
    sha256: bytes

    @property
    def end_position(self) -> int:
        return self.position + self.length


class Signature(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A signature: in a segment over the footer's bytes, in a manifest over the tree's size and head.

    This release writes none and verifies none.
    """

    algorithm: str
    key_id: str
    value: bytes


class SegmentFooter(msgspec.Struct, frozen=True, kw_only=True):
    """The whole footer. Offsets: ``base_offset`` inclusive, ``end_offset`` exclusive. Positions count from the segment's start.

    ``leader_epochs`` is the known part of the partition's history up to ``end_offset``, so it may begin below ``base_offset``.
    ``aborted_transactions`` lists all that overlap the segment, in the order of their markers, of which one may be in a later
    segment; it is complete, because only decided transactions are offloaded. ``first_timestamp_min_ms`` is the minimum over the
    first records of the batches: informative, not a lower bound for all records. ``data_key`` is the key of the object with the
    wrapped data key, empty without encryption. ``compacted`` is set if batches may be missing; the blocks still tile the
    offsets: a block begins where the one before it ends, and ends with its last batch.
    """

    format_version: int
    cluster_id: str
    topic_id: UUID
    topic_name: str
    partition: int
    base_offset: int
    end_offset: int
    ledger_ids: tuple[int, ...]
    blocks: tuple[BlockEntry, ...]
    leader_epochs: tuple[EpochStart, ...]
    aborted_transactions: tuple[AbortedTransaction, ...]
    sections: tuple[SectionEntry, ...]
    record_count: int
    batch_count: int
    data_bytes: int
    min_timestamp_ms: int | None
    max_timestamp_ms: int
    first_timestamp_min_ms: int
    created_at_ms: int
    block_compression: str = NONE
    block_encryption: str = NONE
    data_key: str = ""
    compacted: Literal[True] | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_compacted(self) -> bool:
        return self.compacted is True

    @property
    def is_encrypted(self) -> bool:
        return self.block_encryption != NONE

    @property
    def position(self) -> int:
        """The footer's first byte."""
        return self.sections[-1].end_position if self.sections else self.data_bytes

    def section(self, name: str) -> SectionEntry | None:
        return next((section for section in self.sections if section.name == name), None)


class ProducerSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section ``producers``: idempotent producers after the segment's last record, in the arrays of checkpoints."""

    producers: tuple[ProducerEntry, ...]


class Located(NamedTuple):
    """The fields of a trailer. Lengths are in bytes."""

    position: int
    length: int
    crc: int
    signatures_length: int
    signatures_crc: int
    is_compacted: bool

    @property
    def tail_bytes(self) -> int:
        """Length of footer, signatures and trailer together."""
        return self.length + self.signatures_length + TRAILER_BYTES


def encode_producers(producers: Sequence[ProducerEntry]) -> bytes:
    return msgspec.msgpack.encode(ProducerSection(producers=tuple(producers)))


def describe_section(name: str, content: Buffer, position: int, flags: int = 0) -> SectionEntry:
    """The footer's entry for a section that is stored at ``position``."""
    digest = hashlib.sha256(content).digest()
    return SectionEntry(
        name=name, flags=flags, position=position, length=len(content), crc=crc32c(content), sha256=digest
    )  # fmt: skip


def check_section(content: Buffer, entry: SectionEntry) -> None:
    """Raise ``Corrupt`` unless the bytes are exactly the section's, by CRC and SHA-256."""
    if len(content) != entry.length or crc32c(content) != entry.crc:
        raise Corrupt(f"section {entry.name!r} at byte {entry.position} does not match its length and CRC", section=entry.name)
    if hashlib.sha256(content).digest() != entry.sha256:
        raise Corrupt(f"section {entry.name!r} at byte {entry.position} does not match its SHA-256", section=entry.name)


def parse_producers(content: Buffer, entry: SectionEntry) -> tuple[ProducerEntry, ...]:
    """The producers in their section. Raises ``Corrupt``."""
    check_section(content, entry)
    try:
        return decode_map(content, ProducerSection, {"producers": ProducerEntry}).producers
    except MALFORMED as bad:
        raise Corrupt(f"section {entry.name!r} at byte {entry.position} cannot be decoded: {bad}") from bad


def encode_footer(footer: SegmentFooter, signatures: Sequence[Signature] = ()) -> bytes:
    """Footer, signatures and trailer as bytes, to be written directly after the last section.

    Raises ``Corrupt`` and ``Invalid`` as `check_footer`.
    """
    check_footer(footer, footer.position)
    body = msgspec.msgpack.encode(footer)
    signed = msgspec.msgpack.encode(list(signatures)) if signatures else b""
    fields = footer.position, len(body), crc32c(body), len(signed), crc32c(signed), FORMAT_VERSION
    flags = COMPACTED if footer.is_compacted else 0
    head = _TRAILER.pack(*fields, flags, 0, MAGIC)[:_TRAILER_CRC_START]
    return body + signed + head + crc32c(head).to_bytes(4, "big") + MAGIC


def locate_footer(tail: Buffer, segment_bytes: int) -> Located:
    """Position and lengths of footer and signatures, from a segment's last ``TRAILER_BYTES`` or more bytes.

    Raises ``Corrupt``, or ``Invalid`` for an unknown format version or flag.
    """
    if len(tail) < TRAILER_BYTES or segment_bytes < len(tail):
        raise Corrupt(f"segment of {segment_bytes} bytes is too short for its trailer of {TRAILER_BYTES}")
    trailer = bytes(memoryview(tail)[len(tail) - TRAILER_BYTES :])
    *fields, version, flags, trailer_crc, magic = _TRAILER.unpack(trailer)
    if magic != MAGIC:
        raise Corrupt("the object does not end with a segment's magic: it is truncated or not a segment")
    _check_version(version)
    if crc32c(trailer[:_TRAILER_CRC_START]) != trailer_crc:
        raise Corrupt("segment trailer does not match its CRC")
    refuse_flags("segment trailer", flags, COMPACTED)
    located = Located._make((*fields, bool(flags & COMPACTED)))
    if located.position + located.tail_bytes != segment_bytes:
        raise Corrupt(
            f"segment trailer locates a footer of {located.length} bytes at {located.position} and signatures of"
            f" {located.signatures_length} in a segment of {segment_bytes}"
        )
    return located


def parse_footer(tail: Buffer, segment_bytes: int) -> SegmentFooter:
    """The footer in a segment's last bytes; ``tail`` must include the footer's start (:func:`locate_footer`).

    Raises ``Corrupt`` that names the mismatch, or ``Invalid`` for what this release does not understand and for a ``tail`` that
    is too short.
    """
    located = locate_footer(tail, segment_bytes)
    start = len(tail) - located.tail_bytes
    if start < 0:
        raise Invalid(f"the last {len(tail)} bytes do not hold the whole footer; it needs {located.tail_bytes}")
    body = memoryview(tail)[start : start + located.length]
    if crc32c(body) != located.crc:
        raise Corrupt(f"segment footer at byte {located.position} does not match its CRC", position=located.position)
    _check_signatures(memoryview(tail)[start + located.length : len(tail) - TRAILER_BYTES], located)
    try:
        footer = decode_map(body, SegmentFooter, {"blocks": BlockEntry})
    except MALFORMED as bad:
        raise Corrupt(f"segment footer at byte {located.position} cannot be decoded: {bad}") from bad
    check_footer(footer, located.position)
    if footer.is_compacted != located.is_compacted:
        raise Corrupt("segment footer and trailer differ in whether the segment is compacted")
    return footer


def parse_signatures(tail: Buffer, segment_bytes: int) -> tuple[Signature, ...]:
    """The signatures between footer and trailer. ``tail`` as for `parse_footer`. Raises ``Corrupt``."""
    located = locate_footer(tail, segment_bytes)
    stored = memoryview(tail)[len(tail) - TRAILER_BYTES - located.signatures_length : len(tail) - TRAILER_BYTES]
    return _check_signatures(stored, located)


def refuse_flags(where: str, flags: int, known: int) -> None:
    """Raise ``Invalid`` that names the flags not in ``known``: every flag must be understood."""
    unknown = flags & ~known
    if unknown:
        raise Invalid(f"{where} has flags {flags:#06x}; this release does not know {unknown:#06x}: upgrade it")


def check_footer(footer: SegmentFooter, position: int) -> None:
    """Raise unless the footer agrees with itself and with its ``position``.

    ``Corrupt`` if it does not, ``Invalid`` if it uses what this release does not understand.
    """
    _check_version(footer.format_version)
    if footer.block_compression not in (NONE, ZSTD) or footer.block_encryption not in (NONE, AES_256_GCM):
        raise Invalid(
            f"segment has block compression {footer.block_compression!r} and block encryption {footer.block_encryption!r};"
            f" this release reads compression {NONE!r} and {ZSTD!r}, and encryption {NONE!r} and {AES_256_GCM!r}: upgrade it"
        )
    if bool(footer.data_key) != footer.is_encrypted:
        raise Corrupt(f"segment has block encryption {footer.block_encryption!r} and the data key {footer.data_key!r}")
    _check_blocks(footer)
    _check_sections(footer, position)
    ends = [aborted.last_offset for aborted in footer.aborted_transactions]
    if ends != sorted(ends):
        raise Corrupt("segment footer's aborted transactions are not in the order of their markers")


def _check_version(version: int) -> None:
    if version == _PRE_RELEASE_VERSION:
        raise Invalid(
            f"segment has format version {version}, a layout from before the first release; this release reads"
            f" {FORMAT_VERSION}: use an empty bucket or prefix"
        )
    if version != FORMAT_VERSION:
        raise Invalid(f"segment format version {version} is unknown; this release reads {FORMAT_VERSION}: upgrade it")


def _check_signatures(stored: Buffer, located: Located) -> tuple[Signature, ...]:
    if crc32c(stored) != located.signatures_crc:
        raise Corrupt("segment signatures do not match their CRC")
    if not stored:
        return ()
    try:
        return msgspec.msgpack.decode(stored, type=tuple[Signature, ...])
    except MALFORMED as bad:
        raise Corrupt(f"segment signatures cannot be decoded: {bad}") from bad


def _check_blocks(footer: SegmentFooter) -> None:
    position, offset, records, batches = 0, footer.base_offset, 0, 0
    for index, block in enumerate(footer.blocks):
        _check_block_entry(index, block, position, offset)
        _check_nonce(index, block, is_encrypted=footer.is_encrypted)
        _check_plain_length(index, block, footer.block_compression)
        position, offset = block.end_position, block.last_offset + 1
        records, batches = records + block.record_count, batches + block.batch_count
    found = (position, offset, records, batches)
    if found != (footer.data_bytes, footer.end_offset, footer.record_count, footer.batch_count):
        raise Corrupt(f"segment footer's totals differ from its blocks' bytes, end offset, records and batches {found}")
    if footer.max_timestamp_ms != max((block.max_timestamp_ms for block in footer.blocks), default=-1):
        raise Corrupt("segment footer's maximum timestamp is not that of its blocks")
    if footer.min_timestamp_ms != lowest([block.min_timestamp_ms for block in footer.blocks]):
        raise Corrupt("segment footer's minimum timestamp is not that of its blocks")


def lowest(timestamps_ms: Sequence[int | None]) -> int | None:
    """The minimum; None if any is unknown, or if there is none."""
    known = [one for one in timestamps_ms if one is not None]
    return min(known) if known and len(known) == len(timestamps_ms) else None


def _check_block_entry(index: int, block: BlockEntry, position: int, offset: int) -> None:
    if block.position != position or block.length <= 0:
        raise Corrupt(f"block {index} covers {block.length} bytes from position {block.position}; expected {position}")
    if block.base_offset != offset or block.last_offset < offset:
        raise Corrupt(f"block {index} holds offsets {block.base_offset}..{block.last_offset}; expected them from {offset}")
    if len(block.leaves_root) != HASH_BYTES:
        raise Corrupt(f"block {index} has a Merkle root of {len(block.leaves_root)} bytes")


def _check_nonce(index: int, block: BlockEntry, *, is_encrypted: bool) -> None:
    expected = NONCE_BYTES if is_encrypted else 0
    if len(block.nonce) != expected or (is_encrypted and block.length <= TAG_BYTES):
        raise Corrupt(f"block {index} has {block.length} bytes and a nonce of {len(block.nonce)} bytes; expected {expected}")


def _check_plain_length(index: int, block: BlockEntry, compression: str) -> None:
    content_length = block.length - (TAG_BYTES if block.is_encrypted else 0)
    if block.is_compressed and not (compression == ZSTD and content_length < block.plain_length <= PLAIN_BYTES_MAX):
        raise Corrupt(
            f"block {index} has {block.length} stored bytes and {block.plain_length} plain bytes, which block compression"
            f" {compression!r} does not allow; maximum is {PLAIN_BYTES_MAX} plain bytes"
        )


def _check_sections(footer: SegmentFooter, position: int) -> None:
    expected, names = footer.data_bytes, set[str]()
    for section in footer.sections:
        refuse_flags(f"section {section.name!r}", section.flags, MUST_UNDERSTAND)
        if section.name not in (PRODUCERS, ERASED) and section.flags & MUST_UNDERSTAND:
            raise Invalid(f"segment has section {section.name!r}, which a reader must understand: upgrade this release")
        if section.position != expected or section.length <= 0 or section.name in names:
            raise Corrupt(f"section {section.name!r} has {section.length} bytes at {section.position}; expected {expected}")
        expected = section.end_position
        names.add(section.name)
    if expected != position:
        raise Corrupt(f"segment footer is at byte {position}; its blocks and sections end at {expected}")
