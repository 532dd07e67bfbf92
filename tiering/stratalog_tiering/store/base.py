"""The border to object storage: what every store promises, whatever stands behind it.

Objects are immutable by custom: keys are never reused, and all that matters is written with ``if_absent``. Read after
write, and listing after write, are consistent. What differs between servers stays behind this border; the contract
suite (``tests/contract/test_object_store.py``) holds for all of them.

Errors, in all methods: ``Unavailable`` (not reached, or no answer in time; for a write: nothing happened), ``OutcomeUnknown``
(a write may or may not have happened), ``NoSuchObject`` (explicit absence, never because of an error),
``Conflict`` (``if_absent``, and the key exists), ``Invalid`` (bad key, no such bucket, access denied: configuration),
``StorageFailed`` (a local disk failed or is full).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from stratalog_core.errors import Invalid
from stratalog_core.ports import Buffer

PART_BYTES_MIN: Final = 5 * 1024 * 1024
"""Every part of a multipart upload but the last has at least so many bytes (S3's rule, for all stores)."""

_KEY_SEGMENT: Final = re.compile(r"[A-Za-z0-9_.=-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """``etag`` changes with the content; it is opaque. ``last_modified_ms`` is the store's clock."""

    key: str
    size_bytes: int
    etag: str
    last_modified_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A multipart upload that was begun. Every part but the last has exactly ``part_bytes``.

    ``initiated_ms`` is the store's clock, 0 where not known; ``part_bytes`` is 0 for an upload that was found, which can be
    aborted and no more.
    """

    key: str
    upload_id: str
    initiated_ms: int = 0
    part_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedPart:
    """Receipt of one part; parts are completed in the order of ``number`` (1, 2, 3 …)."""

    number: int
    etag: str
    size_bytes: int
    crc32c: str = ""


class ObjectStore(Protocol):
    """An object store below one root (bucket and prefix, or a directory). Safe to use from many tasks of one event loop."""

    @property
    def url(self) -> str:
        """Where this is, for people; without credentials."""
        ...

    async def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = True) -> None:
        """Write a whole object, durably and at once. With ``if_absent`` one of many concurrent writers wins."""
        ...

    async def get(self, key: str) -> bytes:
        """A whole (small) object."""
        ...

    async def get_range(self, key: str, start: int, length: int, *, uncached: bool = False) -> memoryview:
        """Exactly ``length`` bytes from ``start`` on. Raises ``Corrupt`` if the object ends before.

        ``uncached`` asks for what is stored, and not for what this machine still has in memory of it.
        """
        ...

    async def head(self, key: str) -> ObjectInfo: ...

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Objects whose key begins with ``prefix``, in the order of their keys."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that do not exist are no error. After an error some may be gone: ask again."""
        ...

    async def create_upload(self, key: str, part_bytes: int) -> Upload:
        """Begin an upload in parts of ``part_bytes``; the last one may be smaller."""
        ...

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        """Upload part ``number``, given in several buffers. Sending the same number again replaces it."""
        ...

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart], *, if_absent: bool = True) -> None:
        """Make the object of its parts. After ``Conflict`` or an error the upload may still be open: abort it."""
        ...

    async def abort_upload(self, upload: Upload) -> None:
        """Give an upload up; one that does not exist any more is no error."""
        ...

    def list_uploads(self) -> AsyncIterator[Upload]:
        """All uploads that are neither completed nor aborted."""
        ...

    async def close(self) -> None: ...


def check_key(key: str) -> str:
    """``key`` if it is relative, of plain names with ``/`` between them. Raises ``Invalid``."""
    if all(_KEY_SEGMENT.fullmatch(name) and name not in (".", "..") for name in key.split("/")):
        return key
    raise Invalid(f"object key {key!r} is not made of plain names of letters, digits and _.=- with / between them")


def check_range(start: int, length: int) -> None:
    """Raise ``Invalid`` for a negative start or an empty range."""
    if start < 0 or length <= 0:
        raise Invalid(f"range of {length} bytes from {start} is empty or negative")
