"""The frame of the manifest's objects: magic, format version, must-understand flags and a CRC32C before a msgpack body.

A reader refuses an object with a flag or a version that it does not know. No I/O. Format:
``docs/reference/formats/manifest.md``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from crc32c import crc32c

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer
from stratalog_core.stepwise import decode_map

FORMAT_VERSION: Final = 3
PRE_RELEASE_VERSIONS: Final = (1, 2)
KNOWN_FLAGS: Final = 0
"""Must-understand flags that this release knows; none is defined yet."""

_HEADER: Final = struct.Struct(">8sHHI")
Body = TypeVar("Body", bound=msgspec.Struct)


def object_sha256(content: Buffer) -> bytes:
    """The digest that pointers, chains and references contain."""
    return hashlib.sha256(content).digest()


def frame(magic: bytes, body: msgspec.Struct) -> bytes:
    """The object with this body, without flags."""
    content = msgspec.msgpack.encode(body)
    return _HEADER.pack(magic, FORMAT_VERSION, 0, crc32c(content)) + content


def unframe(
    content: Buffer, magic: bytes, kind: type[Body], name: str, sha256: bytes | None, elements: Mapping[str, type[Any]]
) -> Body:
    """Decode an object's body. Members in ``elements`` have many elements, which are decoded step by step.

    Raises ``Corrupt``, also if the digest is not ``sha256``, and ``Invalid`` for an unknown format version or flag.
    """
    if len(content) < _HEADER.size:
        raise Corrupt(f"{name} of {len(content)} bytes is truncated")
    found_magic, version, flags, crc = _HEADER.unpack_from(content)
    if found_magic != magic:
        raise Corrupt(f"the object is not a {name}: it does not begin with its magic")
    if sha256 is not None and object_sha256(content) != sha256:
        # First: an altered format version or flag looks like that of a later release.
        raise Corrupt(f"{name} is not the committed one: its SHA-256 differs")
    _check_known(name, version, flags)
    body = memoryview(content)[_HEADER.size :]
    if crc32c(body) != crc:
        raise Corrupt(f"{name} does not match its CRC")
    try:
        return decode_map(body, kind, elements)
    except MALFORMED as bad:
        raise Corrupt(f"{name} cannot be decoded: {bad}") from bad


def _check_known(name: str, version: int, flags: int) -> None:
    if version in PRE_RELEASE_VERSIONS:
        raise Invalid(
            f"{name} format version {version} was written by a pre-release; this release reads {FORMAT_VERSION}:"
            " give it an empty bucket or prefix"
        )
    if version != FORMAT_VERSION:
        raise Invalid(f"{name} format version {version} is unknown; this release reads {FORMAT_VERSION}: upgrade it")
    unknown = flags & ~KNOWN_FLAGS
    if unknown:
        raise Invalid(f"{name} has flags {unknown:#06x}, which a reader must understand; this release does not: upgrade it")
