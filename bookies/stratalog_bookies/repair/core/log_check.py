"""Checks the frames of a log file in pieces, so that a scrub holds only a bounded part of the file in memory. No I/O."""

from __future__ import annotations

from typing import NamedTuple

from crc32c import crc32c

from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.log_format import Frame
from stratalog_bookies.protocol.messages import CHECKED_BYTES, ENTRY_HEADER_BYTES


class Copy(NamedTuple):
    """The position of one entry in a log file."""

    ledger_id: int
    entry_id: int
    position: int


class Checked(NamedTuple):
    """The result for one piece: ``end`` is the start of the next piece; ``broken`` means that no intact frame begins there."""

    end: int
    entries: int
    corrupt: list[Copy]
    broken: bool


def check_piece(content: memoryview, base: int, seed: int) -> Checked:
    """Check the frames in ``content``, which is at ``base`` of its file and begins with a frame; the last
    frame may be cut off.
    """
    at = entries = 0
    corrupt: list[Copy] = []
    while at < len(content):
        frame = log_format.read_frame(content, at, seed, base)
        if frame is None:
            is_cut = at > 0 and log_format.claimed_bytes(content, at) > len(content) - at
            return Checked(base + at, entries, corrupt, not is_cut)
        if frame.kind == log_format.ENTRIES:
            entries += frame.item_count
            corrupt += _damaged(content, frame, base)
        at = frame.end
    return Checked(base + at, entries, corrupt, False)


def _damaged(content: memoryview, frame: Frame, base: int) -> list[Copy]:
    corrupt = []
    head, start = frame.head_start, frame.payload_start
    for ledger_id, entry_id, _, payload_bytes, crc, _ in log_format.entries_of(content, frame):
        if crc32c(content[start : start + payload_bytes], crc32c(content[head : head + CHECKED_BYTES])) != crc:
            corrupt.append(Copy(ledger_id, entry_id, base + start))
        head, start = head + ENTRY_HEADER_BYTES, start + payload_bytes
    return corrupt
