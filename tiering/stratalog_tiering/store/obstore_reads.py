"""Reads through obstore, of S3, Azure and Google Cloud: in Rust, off the event loop, in a third of other clients' CPU time.

obstore retries truncated bodies itself, within a small budget. A cancelled read stops at once. A read that takes longer than
its ``ReadLimits`` allow raises ``Unavailable``. Limits count only time in which the event loop runs (``time_limit`` in
``s3_attempts.py``).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

from stratalog_core.errors import Corrupt, NoSuchObject, Refused, StratalogError, Unavailable
from stratalog_tiering.store.base import UnexplainedAbsence
from stratalog_tiering.store.s3_attempts import repeated, time_limit

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

CONNECT_TIMEOUT_S: Final = 2.0
BYTES_PER_S_MIN: Final = 128 * 1024
"""A read that gets fewer bytes per second is given up."""
WHOLE_BYTES: Final = 8 * 1024 * 1024
"""A read of a whole object, whose size is not known before, may take as long as one of so many bytes."""
_REQUEST_TIMEOUT: Final = timedelta(hours=1)
"""obstore's default would be 30 s. ``in_time`` ends each read before."""
_NO_CONTAINER: Final = re.compile("<Code>(NoSuchBucket|ContainerNotFound)</Code>")
_NO_OBJECT: Final = re.compile("<Code>(NoSuchKey|BlobNotFound|ResourceNotFound)</Code>")
"""Without the service's own code, something between us and the service has answered 404."""
_RANGE_REFUSED: Final = re.compile(r"<Code>InvalidRange</Code>|status code: 416\b|InvalidRangeRequest \{")
"""Searched in obstore's text, which also contains the object's name, the port and durations, so bare digits prove nothing."""
_FAILURES: Final = (BaseError, FileNotFoundError, PermissionError)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Time limits of one read with all its attempts, and of the silence after which aioboto3's attempt is repeated.

    ``total_s`` limits a read of nothing, and the silence after which obstore's attempt is repeated.
    """

    total_s: float = 10.0
    silence_s: float = 3.0

    def of(self, length: int) -> float:
        """Seconds that a read of ``length`` bytes may take: several share a link, and a slow one must still be usable."""
        return self.total_s + length / BYTES_PER_S_MIN


async def _unexplained(_: str) -> None:
    """Explain nothing."""


class ObstoreReads:
    """Reads through obstore. ``place`` is the store's address for display; ``name`` gives an object's name by its key.

    ``explain`` raises what a 404 without the service's code means, or returns: then the read is repeated.
    """

    def __init__(
        self,
        store: S3Store | AzureStore | GCSStore,
        place: str,
        name: Callable[[str], str],
        limits: ReadLimits,
        explain: Callable[[str], Awaitable[None]] = _unexplained,
    ) -> None:
        self._store = store
        self._place = place
        self._name = name
        self._limits = limits
        self._explain = explain

    async def get(self, key: str) -> bytes:
        name = self._name(key)

        async def read() -> bytes:
            result = await obstore.get_async(self._store, name)
            return bytes(await result.bytes_async())

        return await self._read(read, key, WHOLE_BYTES)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        name = self._name(key)

        async def read() -> memoryview:
            return memoryview(await obstore.get_range_async(self._store, name, start=start, length=length))

        return await self._read(read, key, length)

    def close(self) -> None:
        """obstore closes its connections when nothing refers to the store."""

    async def _read(self, read: Callable[[], Awaitable[_Result]], key: str, length: int) -> _Result:
        async def attempt() -> _Result:
            try:
                return await read()
            except _FAILURES as failure:
                error = from_obstore(failure, key, self._place)
                if isinstance(error, UnexplainedAbsence):
                    await self._explain(key)
                # obstore repeats a read after any other temporary refusal itself.
                elif "<Code>RequestTimeout</Code>" not in str(failure):
                    raise
                raise error from failure

        try:
            return await in_time(lambda: repeated(attempt), key, self._place, self._limits.of(length))
        except _FAILURES as failure:
            raise from_obstore(failure, key, self._place) from failure


def from_obstore(failure: BaseError | FileNotFoundError | PermissionError, key: str, place: str) -> StratalogError:
    """The error for a failed read of ``key``. obstore's text hides the URL where it holds a shared access signature."""
    text = str(failure)
    if _NO_CONTAINER.search(text):
        return Refused(f"{place}: the bucket does not exist; create it first")
    if _NO_OBJECT.search(text):
        return NoSuchObject(f"object {key} does not exist in {place}", key=key)
    if isinstance(failure, NotFoundError | FileNotFoundError):
        return UnexplainedAbsence(f"{place}: the answer about {key} is 404 without the service's code: is a proxy in between?")
    if isinstance(failure, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return Refused(f"{place}: access to {key} was refused; check credentials and policy")
    if _RANGE_REFUSED.search(text):
        return Corrupt(f"object {key} in {place} ends before the requested range", key=key)
    return Unavailable(f"{place} could not be read ({key}): {text[:300]}")


def covered_bytes(content_range: str, start: int, length: int) -> int:
    """Bytes that a Content-Range header (RFC 9110, 14.4) covers; 0 unless it is all of the request, up to the object's end."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range)
    if found is None:
        return 0
    first, last, size = map(int, found.groups())
    return last + 1 - first if first == start and last + 1 == min(start + length, size) else 0


async def in_time(read: Callable[[], Awaitable[_Result]], key: str, place: str, limit_s: float) -> _Result:
    """The result of ``read``. Raises ``Unavailable`` after ``limit_s``."""
    try:
        async with time_limit(limit_s):
            return await read()
    except TimeoutError as late:
        raise Unavailable(f"{place} did not send {key} in {limit_s:.0f} s") from late


def client_options(endpoint: str, limits: ReadLimits) -> ClientConfig:
    return {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=limits.total_s),
        "timeout": _REQUEST_TIMEOUT,
    }


def retry_config(limits: ReadLimits) -> RetryConfig:
    return {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=limits.total_s),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 3},
    }
