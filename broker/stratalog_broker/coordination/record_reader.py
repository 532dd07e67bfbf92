"""Reads the keys and values of internal topics: big-endian numbers, strings with i16 and bytes with i32 lengths."""

from __future__ import annotations

import struct
from typing import Final

from stratalog_core.errors import Corrupt

_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")


def encode_string(text: str | None) -> bytes:
    """Return a nullable string: i16 length (-1: null) and UTF-8."""
    if text is None:
        return _I16.pack(-1)
    encoded = text.encode()
    return _I16.pack(len(encoded)) + encoded


class Reader:
    """Reads one key or value from its beginning. Truncated content raises ``Corrupt``."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 0

    @property
    def remaining(self) -> int:
        """Bytes that have not been read."""
        return len(self._content) - self._position

    def i16(self) -> int:
        return self._unpack(_I16)

    def i32(self) -> int:
        return self._unpack(_I32)

    def i64(self) -> int:
        return self._unpack(_I64)

    def version(self, newest: int) -> int:
        """Return the version of a value. Raises ``Corrupt`` for one that is newer than ``newest``."""
        version = self.i16()
        if not 0 <= version <= newest:
            raise Corrupt(f"value has version {version}; versions 0 to {newest} are read")
        return version

    def count(self) -> int:
        count = self.i32()
        if not 0 <= count <= self.remaining:
            raise Corrupt(f"array claims {count} elements in {self.remaining} bytes")
        return count

    def string(self) -> str:
        return self.nullable_string() or ""

    def nullable_string(self) -> str | None:
        length = self.i16()
        return None if length < 0 else self.text(length)

    def text(self, length: int) -> str:
        """Return a string of so many bytes."""
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as malformed:
            raise Corrupt(f"string before byte {self._position} is not UTF-8") from malformed

    def blob(self) -> bytes:
        length = self.i32()
        return b"" if length < 0 else self.take(length)

    def _unpack(self, field: struct.Struct) -> int:
        (value,) = field.unpack(self.take(field.size))
        return int(value)

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        piece = self._content[self._position : self._position + length]
        if len(piece) != length:
            raise Corrupt(f"field of {length} bytes at byte {self._position} exceeds its {len(self._content)} bytes")
        self._position += length
        return piece
