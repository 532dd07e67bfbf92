"""The border to object storage: what every store promises.

Objects are immutable by convention: keys are never reused, and everything that matters is written with ``if_absent``. Reads and
listings are consistent after writes. Differences between servers stay behind this border; one contract suite
(``tests/contract/test_object_store.py``) runs against all of them.

All methods raise ``Unavailable`` (not reached, or no answer in time; a write did not happen), ``OutcomeUnknown`` (a write may
or may not have happened), ``NoSuchObject`` (explicit absence, never an error), ``Conflict`` (``if_absent``, and the key
exists), ``Refused`` (no such bucket, access denied, a quota), ``Invalid`` (a bad key, wrong configuration),
``StorageFailed`` (a local disk failed or is full).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, Unavailable
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer

PART_BYTES_MIN: Final = 5 * 1024 * 1024
"""Minimum size of every part of a multipart upload but the last (S3's rule, for all stores)."""

_Item = TypeVar("_Item")
_KEY_SEGMENT: Final = re.compile(r"[A-Za-z0-9_.=-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """``etag`` is opaque and changes with the content. ``last_modified_ms`` is by the store's clock.

    The others are known to ``head`` only: the store's id of the version, empty without versions; the wall time until which the
    version is locked, 0 if it is not; the CRC32C that the store keeps of the object (``checksums.py``), empty if it has none.
    """

    key: str
    size_bytes: int
    etag: str
    last_modified_ms: int
    version_id: str = ""
    locked_until_ms: int = 0
    crc32c: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A multipart upload that was begun. Every part but the last has exactly ``part_bytes``.

    ``initiated_ms`` is by the store's clock, 0 if unknown. ``part_bytes`` is 0 for an upload that was listed; it can only be
    aborted. ``if_absent``: it is completed only if there is no object at ``key``.
    """

    key: str
    upload_id: str
    initiated_ms: int = 0
    part_bytes: int = 0
    if_absent: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedPart:
    """The receipt of one part. The object consists of the parts in the order of ``number`` (1, 2, 3 …)."""

    number: int
    etag: str
    size_bytes: int
    crc32c: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFeatures:
    """Features of a store beyond this interface. ``None``: the credentials do not allow to ask."""

    conditional_replace: bool | None
    """A write can require that the object still has a given etag (``If-Match``)."""
    checksums_at_rest: bool | None
    """The store reports the checksum of an object without sending its bytes, and refuses bytes that do not match theirs."""
    versioning: bool | None
    object_lock: bool | None
    final_deletion: bool | None
    """Deleted objects cannot be restored from the store."""
    unsafe: str = ""
    """Why the store breaks promises of this interface, with the remedy; empty: no reason is known."""


class Locked(Invalid):
    """Objects are locked and were not deleted. ``detail["until_ms"]`` is the wall time of the first one's end, 0 if unknown.

    ``detail["keys"]`` are those that a deletion left.
    """


class UploadGone(NoSuchObject):
    """The multipart upload does not exist: it was aborted, or completed, perhaps by an attempt whose response was lost."""

    code = "upload_gone"


class Throttled(Unavailable):
    """The store takes no more such requests for now: a second later it may."""


class UnexplainedAbsence(Unavailable):
    """404 without the service's word for what does not exist: the answer to a HEAD, or one of a gateway or proxy."""


DATA_KEY_BYTES: Final = 32


class KeyRing(Protocol):
    """Wraps data keys. ``context`` is authenticated: unwrapping needs the same."""

    async def make(self, name: str, context: bytes) -> tuple[bytes, bytes]:
        """A new data key of ``DATA_KEY_BYTES``, and the same wrapped by the key ``name``. Raises as ``wrap`` does."""
        ...

    async def wrap(self, name: str, data_key: bytes, context: bytes) -> bytes:
        """``data_key`` wrapped by the key ``name``. Raises ``StorageFailed`` that names a missing key, ``Invalid``."""
        ...

    async def unwrap(self, name: str, wrapped: bytes, context: bytes) -> bytes:
        """The data key. Raises ``StorageFailed`` that names a missing key, ``Corrupt`` if it is not the right one."""
        ...


class ObjectStore(Protocol):
    """An object store below one root: a bucket and prefix, or a directory. Many tasks of one event loop may use it."""

    @property
    def url(self) -> str:
        """The store's address for display, without credentials."""
        ...

    @property
    def keys(self) -> KeyRing:
        """The keys that protect the data keys of encrypted segments."""
        ...

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        """Write a whole object durably and atomically. With ``if_absent`` exactly one of many concurrent writers succeeds.

        ``storage_class`` is the store's name of a class, which must allow reads at once; empty: the store's default. Raises
        ``Invalid`` for a ``lock`` if the store has no locks.
        """
        ...

    async def get(self, key: str) -> bytes:
        """A whole object, which should be small."""
        ...

    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        """Exactly ``length`` bytes from ``start`` on. Raises ``Corrupt`` if the object is shorter.

        ``or_less``: an object that ends earlier, but not before ``start``, is not an error; fewer bytes are returned.
        ``uncached`` bypasses this machine's page cache and reads from storage.
        """
        ...

    async def head(self, key: str) -> ObjectInfo: ...

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Objects whose key begins with ``prefix``, in key order."""
        ...

    def list_keys(self, prefix: str) -> AsyncIterator[str]:
        """Keys that begin with ``prefix``, in order, those included that have only versions which no reader sees."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects with all of their versions; missing ones are not an error.

        After an error some may be deleted: call it again. Raises ``Locked`` for locked versions, after all others were deleted.
        """
        ...

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        """Begin a multipart upload with parts of ``part_bytes``; the last part may be smaller. The other options: ``put``.

        ``if_absent`` is decided when the upload is completed.
        """
        ...

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        """Upload part ``number``, the concatenation of ``parts``. Sending the same number again replaces the part."""
        ...

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        """Make the object from its parts. After ``Conflict`` or an error the upload may still be open: abort it.

        Returns the checksum of what was sent, as the store computes it (``checksums.py``); empty if it computes none.
        """
        ...

    async def abort_upload(self, upload: Upload) -> None:
        """Abort an upload; a missing one is not an error."""
        ...

    def list_uploads(self) -> AsyncIterator[Upload]:
        """All uploads that are neither completed nor aborted."""
        ...

    async def features(self, key: str) -> StoreFeatures:
        """Return what the store offers, found out by requests about the object at ``key``, which may be replaced."""
        ...

    async def close(self) -> None: ...


async def delete_batches(items: Sequence[_Item], batch: int, delete: Callable[[Sequence[_Item]], Awaitable[None]]) -> None:
    """Delete so many ``items`` at a time. Raises ``Locked`` for what is locked, after all others; any other error at once."""
    locked: list[Locked] = []
    for first in range(0, len(items), batch):
        try:
            await delete(items[first : first + batch])
        except Locked as some:
            locked.append(some)
    if locked:
        keys = dict.fromkeys(key for some in locked for key in some.detail["keys"])
        raise Locked(locked[0].message, until_ms=locked[0].detail["until_ms"], keys=[*keys])


def check_key(key: str) -> str:
    """``key`` if it is relative and consists of plain names separated by ``/``. Raises ``Invalid``."""
    if all(_KEY_SEGMENT.fullmatch(name) and name not in (".", "..") for name in key.split("/")):
        return key
    raise Invalid(f"object key {key!r} is invalid; use names of letters, digits and _.=- separated by /")


def refuse_lock(url: str, lock: ObjectLock | None) -> None:
    """Raise ``Invalid`` for a lock, in a store outside of S3."""
    if lock is not None:
        raise Invalid(
            f"{url} cannot lock objects: locks are offered in S3 buckets with Object Lock only; use one, or set"
            " stratalog.tier.lock.mode=none"
        )


def check_range(start: int, length: int) -> None:
    """Raise ``Invalid`` for a negative start or an empty range."""
    if start < 0 or length <= 0:
        raise Invalid(f"range of {length} bytes from {start} is empty or negative")


def check_length(found: int, key: str, start: int, length: int) -> None:
    """Raise ``Corrupt`` if the object ended after ``found`` of the ``length`` bytes from ``start`` on."""
    if found != length:
        raise Corrupt(f"object {key} ends at byte {start + found}, not {start + length}", key=key)
