"""Inserts long, hand-encoded arrays into responses that kio has encoded with an empty array in their place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from stratalog_broker.protocol.frame import write_uvarint

_COUNT: Final = struct.Struct(">i")


def with_array(encoded: bytes, tail: int, count: int, elements: Sequence[bytes], *, is_flexible: bool) -> bytes:
    """Return ``encoded`` with its empty array, which ends ``tail`` bytes before the end, replaced by ``count`` elements."""
    end = len(encoded) - tail
    if is_flexible:
        return b"".join((encoded[: end - 1], write_uvarint(count + 1), *elements, encoded[end:]))
    return b"".join((encoded[: end - _COUNT.size], _COUNT.pack(count), *elements, encoded[end:]))
