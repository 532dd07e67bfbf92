"""Reads from S3: two engines with the same guarantees, so that a store's URL may choose one.

obstore reads in Rust, off the event loop, with a third of the CPU time; it retries truncated bodies itself, within a small
budget. aioboto3 reads on the event loop and leaves three things to its caller, which are done here: it does not retry a
truncated body, its read time-out never ends a trickle, and neither engine distinguishes a short object from a short response.

A cancelled read stops at once. A read that takes longer than ``total_s`` raises ``Unavailable``. Limits count only time in
which the event loop runs (``time_limit`` in ``s3_attempts.py``).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import boto3
import obstore
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import S3Store as ObstoreS3

from stratalog_core.errors import Corrupt, OutcomeUnknown, Unavailable
from stratalog_tiering.store.s3_async import CONNECT_TIMEOUT_S, AsyncClient
from stratalog_tiering.store.s3_attempts import repeated, time_limit
from stratalog_tiering.store.s3_errors import from_obstore
from stratalog_tiering.store.store_url import S3Location

CREDENTIALS_LIFETIME: Final = timedelta(minutes=5)
"""boto3 renews credentials that expire ten minutes before, whenever it is asked for them, so those it returns last longer than
this. obstore asks again only after this time."""
_PIECE_BYTES: Final = 256 * 1024
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Time limits of one read with all its attempts, and of the silence after which aioboto3's attempt is repeated."""

    total_s: float = 10.0
    silence_s: float = 3.0


class ReadEngine(Protocol):
    """Reads whole objects and ranges. Raises as :class:`stratalog_tiering.store.base.ObjectStore`."""

    async def get(self, key: str) -> bytes: ...

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        """The bytes from ``start`` on, fewer than ``length`` only if the object ends earlier."""
        ...


class ObstoreReads:
    """Reads through obstore. One obstore client per process, so one connection pool."""

    def __init__(self, location: S3Location, session: boto3.Session, endpoint: str, limits: ReadLimits) -> None:
        self._location = location
        self._store = _obstore_client(location, session, endpoint, limits)
        self._limits = limits

    async def get(self, key: str) -> bytes:
        name = self._location.name(key)

        async def read() -> bytes:
            result = await obstore.get_async(self._store, name)
            return bytes(await result.bytes_async())

        return await self._read(read, key)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        name = self._location.name(key)

        async def read() -> memoryview:
            return memoryview(await obstore.get_range_async(self._store, name, start=start, length=length))

        return await self._read(read, key)

    async def _read(self, read: Callable[[], Awaitable[_Result]], key: str) -> _Result:
        async def attempt() -> _Result:
            try:
                return await read()
            except BaseError as failure:
                # obstore repeats a read after any other temporary refusal itself.
                if "<Code>RequestTimeout</Code>" in str(failure):
                    raise from_obstore(failure, key, self._location.url) from failure
                raise

        try:
            return await _in_time(lambda: repeated(attempt), key, self._location, self._limits)
        except (BaseError, FileNotFoundError, PermissionError) as failure:
            raise from_obstore(failure, key, self._location.url) from failure


class Aioboto3Reads:
    """Reads through the store's asynchronous client."""

    def __init__(self, location: S3Location, client: AsyncClient, limits: ReadLimits) -> None:
        self._location = location
        self._client = client
        self._limits = limits

    async def get(self, key: str) -> bytes:
        return await self._read(key, None)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        return memoryview(await self._read(key, (start, length)))

    async def _read(self, key: str, wanted: tuple[int, int] | None) -> bytes:
        arguments: dict[str, Any] = {"Bucket": self._location.bucket, "Key": self._location.name(key)}
        if wanted:
            arguments["Range"] = f"bytes={wanted[0]}-{sum(wanted) - 1}"

        async def read() -> bytes:
            return await repeated(lambda: self._attempt(key, wanted, arguments))

        return await _in_time(read, key, self._location, self._limits)

    async def _attempt(self, key: str, wanted: tuple[int, int] | None, arguments: dict[str, Any]) -> bytes:
        async with self._client.answering(key) as client, time_limit(self._limits.silence_s) as heard:
            answer = await client.get_object(**arguments)
            async with answer["Body"]:
                if wanted and not _covers(answer.get("ContentRange", ""), *wanted):
                    raise Unavailable(f"{self._location.url} returned another range of {key} than was requested")
                content = await self._pieces(answer["Body"], heard)
        # Fewer bytes than the header promised are a truncated response, never the end of the object.
        if len(content) != answer["ContentLength"]:
            raise OutcomeUnknown(f"{self._location.url} sent {len(content)} of {answer['ContentLength']} bytes of {key}")
        return content

    async def _pieces(self, body: Any, heard: Callable[[], None]) -> bytes:
        pieces = []
        while piece := await body.read(_PIECE_BYTES):
            heard()
            pieces.append(piece)
        return b"".join(pieces)


def check_length(content: memoryview, key: str, start: int, length: int) -> memoryview:
    """``content`` if it is complete. Raises ``Corrupt`` if the object is shorter."""
    if len(content) != length:
        raise Corrupt(f"object {key} ends at byte {start + len(content)}, not {start + length}", key=key)
    return content


def _covers(content_range: str, start: int, length: int) -> bool:
    """Whether a Content-Range header (RFC 9110, 14.4) covers the whole request, up to the object's end."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range)
    if found is None:
        return False
    first, last, size = map(int, found.groups())
    return first == start and last + 1 == min(start + length, size)


async def _in_time(read: Callable[[], Awaitable[_Result]], key: str, location: S3Location, limits: ReadLimits) -> _Result:
    try:
        async with time_limit(limits.total_s):
            return await read()
    except TimeoutError as late:
        raise Unavailable(f"{location.url} did not answer about {key} in {limits.total_s} s") from late


def _obstore_client(location: S3Location, session: boto3.Session, endpoint: str, limits: ReadLimits) -> ObstoreS3:
    return ObstoreS3(
        location.bucket,
        endpoint=endpoint,
        region=location.region,
        virtual_hosted_style_request=False,
        credential_provider=Boto3CredentialProvider(session, ttl=CREDENTIALS_LIFETIME),
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=limits.total_s),
        },
        retry_config={
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=limits.total_s),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 3},
        },
    )
