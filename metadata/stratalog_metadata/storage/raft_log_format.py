"""The byte layout of the Raft log's files: segment header, record, vote. Pure. docs/reference/formats/metadata-log.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import crc32c

from stratalog_core.errors import Corrupt
from stratalog_metadata.raft.messages import Entry, EntryKind
from stratalog_metadata.raft.ready import HardState

VERSION: Final = 2
VOTE_VERSION: Final = 2
SEGMENT_MAGIC: Final = b"SLRAFTLG"
RECORD_MAGIC: Final = b"SLRE"
VOTE_MAGIC: Final = b"SLVT"
_RESET: Final = 1
_KINDS: Final = frozenset(EntryKind)
_SEGMENT: Final = struct.Struct(">8sHHQQ")
_VOTE_MAGIC_AND_VERSION: Final = struct.Struct(">4sH")
_VOTE_1: Final = struct.Struct(">4sHQQ")
_VOTE: Final = struct.Struct(">4sHQQQQ")
_PREFIX: Final = struct.Struct(">4sI")
_PAYLOAD_CHECKSUM: Final = struct.Struct(">I")
_BODY: Final = struct.Struct(">IIQQQB")
_CHECKSUM: Final = struct.Struct(">I")
SEGMENT_HEADER_BYTES: Final = _SEGMENT.size + _CHECKSUM.size
RECORD_HEADER_BYTES: Final = _PREFIX.size + _PAYLOAD_CHECKSUM.size + _BODY.size
SECTOR_BYTES: Final = 512
"""Bytes that a disk writes entirely or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The segment's first record follows (``base_index``, ``base_term``); ``reset``: earlier segments do not count."""

    base_index: int
    base_term: int
    reset: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """``batch_position``: start of the batch that it was written with. ``record_bytes``: its size on disk."""

    entry: Entry
    previous_term: int
    batch_position: int
    record_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMark:
    """The least extent of the log: up to byte ``end`` of its newest segment ``segment`` (0: there is none)."""

    segment: int = 0
    end: int = 0


def _sealed(content: bytes) -> bytes:
    return content + _CHECKSUM.pack(crc32c.crc32c(content))


def _is_sealed(content: bytes | memoryview) -> bool:
    return _CHECKSUM.pack(crc32c.crc32c(content[:-4])) == content[-4:]


def pack_segment(base_index: int, base_term: int, *, reset: bool) -> bytes:
    return _sealed(_SEGMENT.pack(SEGMENT_MAGIC, VERSION, _RESET if reset else 0, base_index, base_term))


def unpack_segment(content: memoryview) -> SegmentHeader | None:
    """The header at the start of a segment; None if it is damaged. Raises ``Corrupt`` for another version."""
    header = content[:SEGMENT_HEADER_BYTES]
    if len(header) < SEGMENT_HEADER_BYTES or not _is_sealed(header):
        return None
    magic, version, flags, base_index, base_term = _SEGMENT.unpack_from(header)
    if magic != SEGMENT_MAGIC or version != VERSION:
        raise Corrupt(f"raft log segment of version {version}; this node reads version {VERSION}")
    return SegmentHeader(base_index=base_index, base_term=base_term, reset=bool(flags & _RESET))


def pack_record(entry: Entry, previous_term: int, batch_position: int) -> bytes:
    body = _BODY.pack(len(entry.payload), batch_position, entry.index, entry.term, previous_term, entry.kind)
    header = _PAYLOAD_CHECKSUM.pack(crc32c.crc32c(entry.payload)) + body
    return b"".join((_PREFIX.pack(RECORD_MAGIC, crc32c.crc32c(header)), header, entry.payload))


def unpack_record(content: memoryview, position: int) -> StoredEntry | None:
    """The record at ``position``; None if it is damaged or incomplete. Raises ``Corrupt`` for an unknown kind."""
    payload_start = position + RECORD_HEADER_BYTES
    if not _is_header(content, position):
        return None
    length, batch_position, index, term, previous_term, kind = _BODY.unpack_from(content, payload_start - _BODY.size)
    end = payload_start + length
    (checksum,) = _PAYLOAD_CHECKSUM.unpack_from(content, position + _PREFIX.size)
    if end > len(content) or crc32c.crc32c(content[payload_start:end]) != checksum:
        return None
    if kind not in _KINDS:
        raise Corrupt(
            f"raft log record {index} is of kind {kind}, which this version does not know: start the one that wrote it"
        )
    return StoredEntry(
        entry=Entry(index, term, EntryKind(kind), bytes(content[payload_start:end])),
        previous_term=previous_term,
        batch_position=batch_position,
        record_bytes=end - position,
    )


def _is_header(content: memoryview, position: int) -> bool:
    """Whether there is an undamaged record header at ``position``."""
    payload_start = position + RECORD_HEADER_BYTES
    if payload_start > len(content):
        return False
    magic, checksum = _PREFIX.unpack_from(content, position)
    found = int(crc32c.crc32c(content[position + _PREFIX.size : payload_start]))
    return bool(magic == RECORD_MAGIC and found == checksum)


def is_torn(content: memoryview, position: int) -> bool:
    """Whether an interrupted write explains the missing record at ``position``, in the last batch of a segment.

    An interrupted write leaves sectors as they were: beyond the end of the file, or zeros. Anything else is damage.
    """
    damaged, end = position, position + RECORD_HEADER_BYTES
    if _is_header(content, position):
        damaged, end = end, end + _BODY.unpack_from(content, end - _BODY.size)[0]
    if end > len(content):
        return True
    sectors = range(damaged - damaged % SECTOR_BYTES, end, SECTOR_BYTES)
    return any(not any(content[max(position, sector) : sector + SECTOR_BYTES]) for sector in sectors)


def was_durable(content: bytes, position: int) -> bool:
    """Whether a complete record after ``position`` belongs to a batch that started after it.

    Such a batch was written only after everything before it had been synced.
    """
    view = memoryview(content)
    candidate = content.find(RECORD_MAGIC, position + 1)
    while candidate >= 0:
        stored = unpack_record(view, candidate)
        if stored is not None and stored.batch_position > position:
            return True
        candidate = content.find(RECORD_MAGIC, candidate + 1)
    return False


def pack_vote(hard_state: HardState, mark: LogMark) -> bytes:
    return _sealed(
        _VOTE.pack(VOTE_MAGIC, VOTE_VERSION, hard_state.term, hard_state.voted_for, mark.segment, mark.end)
    )  # fmt: skip


def unpack_vote(content: bytes) -> tuple[HardState, LogMark | None]:
    """Term, vote and mark; the mark is None in a file of version 1. Raises ``Corrupt``: the file is replaced atomically and
    is never torn.
    """
    if len(content) not in (_VOTE_1.size + _CHECKSUM.size, _VOTE.size + _CHECKSUM.size) or not _is_sealed(content):
        raise Corrupt(
            "the vote file is damaged: restore it from a backup; an empty node in its place may lose what it has acknowledged"
        )
    magic, version = _VOTE_MAGIC_AND_VERSION.unpack_from(content)
    layout = {1: _VOTE_1, VOTE_VERSION: _VOTE}.get(version)
    if magic != VOTE_MAGIC or layout is None or len(content) != layout.size + _CHECKSUM.size:
        raise Corrupt(f"vote file of version {version}; this node reads versions up to {VOTE_VERSION}")
    _, _, term, voted_for, *mark = layout.unpack_from(content)
    return HardState(term=term, voted_for=voted_for), LogMark(segment=mark[0], end=mark[1]) if mark else None
