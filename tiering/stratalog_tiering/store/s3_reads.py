"""Reads from S3: three engines with the same guarantees, so that a store's URL may choose one.

``direct`` (``direct_reads.py``) is the default; obstore (``obstore_reads.py``) reads under TLS, and what ``direct`` failed to
read. aioboto3 reads on the event loop and leaves three things to its caller, which are done here: it does not retry a truncated
body, its read time-out never ends a trickle, and it does not distinguish a short object from a short response.

A cancelled read stops at once. A read that takes longer than its ``ReadLimits`` allow raises ``Unavailable``. Limits count only
time in which the event loop runs (``time_limit`` in ``s3_attempts.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol

import boto3
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.store import S3Store as ObstoreS3

from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_tiering.store.obstore_reads import (
    WHOLE_BYTES,
    ObstoreReads,
    ReadLimits,
    client_options,
    covered_bytes,
    in_time,
    retry_config,
)
from stratalog_tiering.store.s3_async import AsyncClient
from stratalog_tiering.store.s3_attempts import repeated, time_limit
from stratalog_tiering.store.store_url import S3Location

CREDENTIALS_LIFETIME: Final = timedelta(minutes=5)
"""boto3 renews credentials that expire ten minutes before, whenever it is asked for them, so those it returns last longer than
this. obstore and ``direct_reads.py`` ask again only after this time."""
_PIECE_BYTES: Final = 256 * 1024


class ReadEngine(Protocol):
    """Reads whole objects and ranges. Raises as :class:`stratalog_tiering.store.base.ObjectStore`."""

    async def get(self, key: str) -> bytes: ...

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        """The bytes from ``start`` on, fewer than ``length`` only if the object ends earlier."""
        ...

    def close(self) -> None: ...


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

    def close(self) -> None:
        """The client is the store's."""

    async def _read(self, key: str, wanted: tuple[int, int] | None) -> bytes:
        arguments: dict[str, Any] = {"Bucket": self._location.bucket, "Key": self._location.name(key)}
        if wanted:
            arguments["Range"] = f"bytes={wanted[0]}-{sum(wanted) - 1}"

        async def read() -> bytes:
            return await repeated(lambda: self._attempt(key, wanted, arguments))

        return await in_time(read, key, self._location.url, self._limits.of(wanted[1] if wanted else WHOLE_BYTES))

    async def _attempt(self, key: str, wanted: tuple[int, int] | None, arguments: dict[str, Any]) -> bytes:
        async with self._client.answering(key) as client, time_limit(self._limits.silence_s) as heard:
            answer = await client.get_object(**arguments)
            async with answer["Body"]:
                if wanted and not covered_bytes(answer.get("ContentRange", ""), *wanted):
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


def obstore_reads(location: S3Location, session: boto3.Session, endpoint: str, limits: ReadLimits) -> ObstoreReads:
    """Reads of ``location`` through obstore, which signs with the credentials of ``session``."""
    store = ObstoreS3(
        location.bucket,
        endpoint=endpoint,
        region=location.region,
        virtual_hosted_style_request=False,
        credential_provider=Boto3CredentialProvider(session, ttl=CREDENTIALS_LIFETIME),
        client_options=client_options(endpoint, limits),
        retry_config=retry_config(limits),
    )
    return ObstoreReads(store, location.url, location.name, limits)
