"""Checksums made right again, so that what lies behind them is reached: the last change of a mutated input.

The first byte of a sealed input says whether to seal at all (even: yes), so that wrong checksums are tried too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from crc32c import crc32c

from stratalog_core.batches.batch import CRC_START, HEADER_BYTES, read_header
from stratalog_core.errors import Corrupt


def opened(content: bytes, seal: Callable[[bytes], bytes]) -> bytes:
    """The meaning of an input."""
    body = content[1:]
    return body if content[:1] and content[0] & 1 else seal(body)


def sealed(body: bytes) -> bytes:
    """An input that stands for ``body``, its checksums made right."""
    return b"\x00" + body


def batches(run: bytes) -> bytes:
    """Each record batch of a run with a CRC that matches, as far as their lengths lead."""
    out = bytearray(run)
    for start, end in _batches(out):
        out[start + 17 : start + 21] = crc32c(out[start + CRC_START : end]).to_bytes(4, "big")
    return bytes(out)


def _batches(run: bytearray) -> Iterator[tuple[int, int]]:
    position = 0
    while position + HEADER_BYTES <= len(run):
        try:
            size = read_header(run, position).size_bytes
        except Corrupt:
            return
        end = min(position + max(size, HEADER_BYTES), len(run))
        yield position, end
        position = end


def trailing(content: bytes) -> bytes:
    """A CRC32C over all before it, at the end."""
    return content[:-4] + struct.pack(">I", crc32c(content[:-4]))
