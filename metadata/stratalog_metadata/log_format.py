"""Bytes of the Raft log's files: segment header, record, vote. Pure; described in docs/formats/metadata-log.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import crc32c

from stratalog_core.errors import Corrupt
from stratalog_metadata.raft.messages import Entry, EntryKind
from stratalog_metadata.raft.ready import HardState

VERSION: Final = 1
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
_BODY: Final = struct.Struct(">IIQQQB")
_CHECKSUM: Final = struct.Struct(">I")
SEGMENT_HEADER_BYTES: Final = _SEGMENT.size + _CHECKSUM.size
RECORD_HEADER_BYTES: Final = _PREFIX.size + _BODY.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The segment's first record follows (``base_index``, ``base_term``); ``reset``: nothing before it counts."""

    base_index: int
    base_term: int
    reset: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """``batch_position``: where the batch began that it was written with. ``record_bytes``: its size on disk."""

    entry: Entry
    previous_term: int
    batch_position: int
    record_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMark:
    """How far the log reaches at least: up to byte ``end`` of segment ``segment``, the newest (0: there is none yet)."""

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
    checksum = crc32c.crc32c(entry.payload, crc32c.crc32c(body))
    return b"".join((_PREFIX.pack(RECORD_MAGIC, checksum), body, entry.payload))


def unpack_record(content: memoryview, position: int) -> StoredEntry | None:
    """The record at ``position``; None if there is no whole, undamaged one. Raises ``Corrupt`` for an unknown kind."""
    start = position + _PREFIX.size
    if start + _BODY.size > len(content):
        return None
    magic, checksum = _PREFIX.unpack_from(content, position)
    length, batch_position, index, term, previous_term, kind = _BODY.unpack_from(content, start)
    end = start + _BODY.size + length
    if magic != RECORD_MAGIC or end > len(content) or crc32c.crc32c(content[start:end]) != checksum:
        return None
    if kind not in _KINDS:
        raise Corrupt(
            f"raft log record {index} is of kind {kind}, which this version does not know: start the one that wrote it"
        )
    return StoredEntry(
        entry=Entry(index, term, EntryKind(kind), bytes(content[start + _BODY.size : end])),
        previous_term=previous_term,
        batch_position=batch_position,
        record_bytes=end - position,
    )


def was_durable(content: bytes, position: int) -> bool:
    """Whether a whole record behind ``position`` belongs to a batch that was begun behind it.

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
    """Term and vote, and the mark; None in a file of version 1. Raises ``Corrupt``: it is replaced atomically, never torn."""
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
