"""The bytes of a log file: file header, frames, control items, and the scan that finds where a file ends.

A disk's log is a sequence of files of fixed size, numbered by a generation that never repeats. Files are recycled, so frames of
an earlier generation follow the tail: the CRC of every frame header is seeded with the disk's cookie and the file's generation,
and a foreign frame never matches. ``docs/reference/formats/bookie-log.md`` specifies every byte.

Frames are written in groups, one write and one sync each, and a group begins only when the previous one is durable. Each frame
names the start of its group, so any intact frame proves that everything before its group was once durable. This is how the scan
distinguishes a torn tail (nothing in it was acknowledged: cut it off) from corruption (it may hold acknowledged entries: refuse
to continue). It does no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from stratalog_bookies.protocol.messages import CHECKED_BYTES, ENTRY_HEADER, ENTRY_HEADER_BYTES
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer

VERSION: Final = 1
PAGE_BYTES: Final = 4096
FIRST_FRAME: Final = PAGE_BYTES
"""The file header has a page of its own, so that no later write touches it."""
ALIGNMENT: Final = 8
COOKIE_BYTES: Final = 16

FILE_MAGIC: Final = b"SLLG"
FRAME_MAGIC: Final = b"SLFR"
ENTRIES: Final = 1
CONTROL: Final = 2

FENCE: Final = 1
TOMBSTONE: Final = 2
EXPLICIT_LAC: Final = 3
FILE_START: Final = 4
"""First item of a file: the value is the end of the previous file (0: unknown, after a restart)."""
PROOF: Final = 5
"""Carries no fact (ledger and value 0). Its frame proves that everything before it was durable."""

_FILE_HEADER = struct.Struct(">4sHHQ16sQ")
_CRC = struct.Struct(">I")
_FIELDS = struct.Struct(">BBHIIIII")
_FRAME = struct.Struct(">4sIBBHIIIII")
FRAME_BYTES: Final = _FRAME.size
_ITEM = struct.Struct(">BQq")
ITEM_BYTES: Final = _ITEM.size
_HEAD_BYTES: Final = {ENTRIES: ENTRY_HEADER_BYTES, CONTROL: ITEM_BYTES}
"""Bytes of the head per item of a frame, by kind."""


class ControlItem(NamedTuple):
    """One fact about a ledger: a fence or tombstone (value 0), an explicit LAC, or the start of a file (ledger 0)."""

    kind: int
    ledger_id: int
    value: int


class Frame(NamedTuple):
    """A frame whose header is intact; its payloads are not checked yet. Positions are byte offsets in the file."""

    kind: int
    item_count: int
    position: int
    group_start: int
    head_start: int
    payload_start: int
    payload_end: int

    @property
    def end(self) -> int:
        return aligned(self.payload_end)


class Scan(NamedTuple):
    """The content of a file: ``frames`` in order, the end of the last, and the positions of frames with corrupt payloads."""

    frames: list[Frame]
    end: int
    corrupt_frames: frozenset[int]


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def frame_size(head_bytes: int, payload_bytes: int) -> int:
    """Bytes that a frame takes in the file."""
    return aligned(FRAME_BYTES + head_bytes + payload_bytes)


def frame_seed(cookie: bytes, generation: int) -> int:
    """Seed of the CRCs of a file's frame headers."""
    return int(crc32c(cookie + generation.to_bytes(8, "big")))


def pack_file_header(cookie: bytes, generation: int, file_bytes: int) -> bytes:
    """First page of a file."""
    fields = _FILE_HEADER.pack(FILE_MAGIC, VERSION, 0, generation, cookie, file_bytes)
    return (fields + _CRC.pack(crc32c(fields))).ljust(PAGE_BYTES, b"\0")


def check_file_header(page: Buffer, cookie: bytes, generation: int) -> None:
    """Raise ``Corrupt`` unless ``page`` is the first page of this file of this disk."""
    fields = bytes(page[: _FILE_HEADER.size])
    if len(page) < _FILE_HEADER.size + _CRC.size or _CRC.unpack_from(page, _FILE_HEADER.size)[0] != crc32c(fields):
        raise Corrupt(f"header of log file {generation:016x} does not match its CRC")
    magic, version, _, found, found_cookie, _ = _FILE_HEADER.unpack(fields)
    if magic != FILE_MAGIC or version != VERSION:
        raise Corrupt(f"log file {generation:016x} has format {magic!r} version {version}; this bookie reads version {VERSION}")
    if found != generation or found_cookie != cookie:
        raise Corrupt(f"log file {generation:016x} belongs to another disk or generation ({found:016x})")


def pack_frame(seed: int, kind: int, count: int, position: int, group_start: int, head: Buffer, payload_bytes: int) -> bytes:
    """The header of a frame; ``head`` (entry headers or control items) and the payloads follow it in the file."""
    fields = _FIELDS.pack(kind, VERSION, 0, count, position, group_start, len(head), payload_bytes)
    return FRAME_MAGIC + _CRC.pack(crc32c(head, crc32c(fields, seed))) + fields


def pack_items(items: Iterable[ControlItem]) -> bytes:
    return b"".join([_ITEM.pack(*item) for item in items])


def items_of(content: memoryview, frame: Frame) -> list[ControlItem]:
    """Items of a control frame."""
    return [ControlItem._make(item) for item in _ITEM.iter_unpack(content[frame.head_start : frame.payload_start])]


def entries_of(content: memoryview, frame: Frame) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Entry headers of an entries frame, as plain tuples in the order of ``messages.EntryHeader``."""
    return ENTRY_HEADER.iter_unpack(content[frame.head_start : frame.payload_start])


def claimed_bytes(content: Buffer, position: int) -> int:
    """The length that the frame at ``position`` claims, unchecked; 0 if there is no frame; ``FRAME_BYTES`` if the header is cut
    off.
    """
    if position + FRAME_BYTES > len(content):
        return FRAME_BYTES
    magic, _, _, version, _, _, _, _, head_bytes, payload_bytes = _FRAME.unpack_from(content, position)
    return frame_size(head_bytes, payload_bytes) if magic == FRAME_MAGIC and version == VERSION else 0


def read_frame(content: memoryview, position: int, seed: int, base: int = 0) -> Frame | None:
    """The frame at ``position``, or None if there is no intact frame header of this generation.

    ``content`` is at ``base`` of its file; the frame's positions are within ``content``. Raises ``Corrupt`` for a frame with a
    matching CRC and impossible fields: an unknown kind, or a head of the wrong length.
    """
    if position + FRAME_BYTES > len(content):
        return None
    magic, crc, kind, version, _, count, at, group_start, head_bytes, payload_bytes = _FRAME.unpack_from(content, position)
    head_start = position + FRAME_BYTES
    payload_start = head_start + head_bytes
    if magic != FRAME_MAGIC or version != VERSION or at != base + position or payload_start + payload_bytes > len(content):
        return None
    fields_crc = crc32c(content[position + 8 : head_start], seed)
    if crc32c(content[head_start:payload_start], fields_crc) != crc:
        return None
    if not count or head_bytes != count * _HEAD_BYTES.get(kind, 0):
        raise Corrupt(f"frame at byte {position} is of kind {kind} and has {count} items in {head_bytes} bytes")
    return Frame(kind, count, position, group_start, head_start, payload_start, payload_start + payload_bytes)


def payloads_match(content: memoryview, frame: Frame) -> bool:
    """Whether every entry of a frame matches its CRC."""
    if frame.kind != ENTRIES:
        return True
    head, start = frame.head_start, frame.payload_start
    for _, _, _, payload_bytes, crc, _ in entries_of(content, frame):
        if crc32c(content[start : start + payload_bytes], crc32c(content[head : head + CHECKED_BYTES])) != crc:
            return False
        head, start = head + ENTRY_HEADER_BYTES, start + payload_bytes
    return start == frame.payload_end


def scan(content: bytes, seed: int, durable_end: int = 0) -> Scan:
    """All frames of a file that was not closed. ``durable_end`` is its end according to the next file (0: unknown).

    A durable frame with a corrupt payload is kept: its entries exist and are unreadable. Raises ``Corrupt`` if durable frames
    are missing.
    """
    view = memoryview(content)
    frames, end = _walk(view, seed)
    proved = max([durable_end, *(frame.group_start for frame in frames), *_group_starts_behind(content, end, seed)])
    if end < proved:
        raise Corrupt(f"no intact frame at byte {end}, although everything up to byte {proved} was durable", position=end)
    kept: list[Frame] = []
    corrupt = set[int]()
    for frame in frames:
        if not payloads_match(view, frame):
            if frame.position >= proved:
                return Scan(kept, frame.position, frozenset(corrupt))
            corrupt.add(frame.position)
        kept.append(frame)
    return Scan(kept, end, frozenset(corrupt))


def _walk(view: memoryview, seed: int) -> tuple[list[Frame], int]:
    frames = []
    position = FIRST_FRAME
    while (frame := read_frame(view, position, seed)) is not None:
        frames.append(frame)
        position = frame.end
    return frames, position


def _group_starts_behind(content: bytes, position: int, seed: int) -> Iterator[int]:
    """Group starts of all intact frames after ``position``."""
    view = memoryview(content)
    position = content.find(FRAME_MAGIC, position)
    while position >= 0:
        frame = read_frame(view, position, seed) if position % ALIGNMENT == 0 else None
        if frame is not None:
            yield frame.group_start
        position = content.find(FRAME_MAGIC, position + 1)
