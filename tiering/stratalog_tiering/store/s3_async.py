"""The one aioboto3 client of a store: opened by its first request, open until the store is closed.

It serves small, frequent requests (listings, HEADs, deletions), and reads if the URL selects that engine. Only repeatable
requests use it: aiohttp reports a connection that broke after the request was sent like one that never opened, so a failure
never proves that nothing happened. It belongs to the event loop that used it first, and retries nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import aioboto3
import aiohttp
import botocore.session
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from stratalog_core.errors import Unavailable
from stratalog_tiering.store.obstore_reads import CONNECT_TIMEOUT_S
from stratalog_tiering.store.s3_attempts import time_limit
from stratalog_tiering.store.s3_errors import from_botocore, no_answer
from stratalog_tiering.store.store_url import S3Location

REQUEST_TIMEOUT_S: Final = 30.0
CONNECTIONS_MAX: Final = 32
_BREAKS: Final = (TimeoutError, OSError, aiohttp.ClientError, ResponseParserError)


class AsyncClient:
    """``core`` is the store's session; sharing its loaded service description saves four fifths of the opening time."""

    def __init__(self, location: S3Location, core: botocore.session.Session) -> None:
        self._location = location
        self._core = core
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._closed = False

    async def request(self, operation: str, key: str, **arguments: Any) -> Any:
        """Send one request whose response has no body to stream, within 30 s. ``key`` is for error messages."""
        async with self.answering(key) as client, time_limit(REQUEST_TIMEOUT_S):
            return await getattr(client, operation)(Bucket=self._location.bucket, **arguments)

    @asynccontextmanager
    async def answering(self, key: str) -> AsyncIterator[Any]:
        """The client. Failures inside the context are raised as this project's errors (``s3_errors.py``)."""
        try:
            yield await self._opened()
        except (BotoCoreError, ClientError) as failure:
            raise from_botocore(failure, key, self._location.url) from failure
        except _BREAKS as failure:
            raise no_answer(failure, key, self._location.url) from failure

    async def _opened(self) -> Any:
        if self._closed:
            raise Unavailable(f"{self._location.url}: the store is closed")
        async with self._opening:
            if self._client is None:
                self._client = await self._stack.enter_async_context(self._new_client())
        return self._client

    def _new_client(self) -> Any:
        session = AioSession()
        session.register_component("data_loader", self._core.get_component("data_loader"))
        config = AioConfig(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=REQUEST_TIMEOUT_S,
            retries={"total_max_attempts": 1},
            max_pool_connections=CONNECTIONS_MAX,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": self._location.addressing},
        )
        made = aioboto3.Session(botocore_session=session, region_name=self._location.region)
        return made.client("s3", endpoint_url=self._location.endpoint, config=config)

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        self._closed = True
        await self._stack.aclose()
