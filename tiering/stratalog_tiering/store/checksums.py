"""CRC32C of objects as S3 and Google write it: base64. S3 computes that of an object of several parts from theirs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from crc32c import crc32c

from stratalog_core.ports import Buffer
from stratalog_tiering.store.base import UploadedPart


def crc_text(content: Iterable[Buffer]) -> str:
    """The checksum of an object, or of a part, whose bytes are ``content``."""
    crc = 0
    for piece in content:
        crc = crc32c(piece, crc)
    return crc_as_text(crc)


def crc_as_text(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def crc_text_of_parts(parts: Sequence[UploadedPart]) -> str:
    """The checksum of an object made from ``parts``, in this order; empty if the checksum of one is unknown."""
    if not all(part.crc32c for part in parts):
        return ""
    return f"{crc_text(base64.b64decode(part.crc32c) for part in parts)}-{len(parts)}"
