"""The shared half of our requests to Azure and Google Cloud, sent by urllib3 in the store's threads: obstore lacks them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_core.ports import Background, Buffer
from stratalog_tiering.store.base import Locked, delete_batches
from stratalog_tiering.store.obstore_reads import CONNECT_TIMEOUT_S
from stratalog_tiering.store.s3_attempts import repeated

REQUEST_TIMEOUT_S: Final = 30.0
_PIECE_BYTES: Final = 64 * 1024
_DELETIONS_AT_ONCE: Final = 16
_NEVER_LEFT: Final = (NewConnectionError, ConnectTimeoutError)
_UNAUTHORIZED: Final = 401
_Result = TypeVar("_Result")
_Token = TypeVar("_Token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpRequests:
    """``place`` is the store's address for error messages, which never repeat a URL: it may hold a secret."""

    def __init__(self, place: str, background: Background, threads: int) -> None:
        self._place = place
        self._background = background
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=REQUEST_TIMEOUT_S)
        self._pool = urllib3.PoolManager(maxsize=threads, block=True, retries=False, timeout=timeout)

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """The result of a call that blocks, such as a request."""
        return await self._background.run(call)

    async def repeated(self, call: Callable[[], _Result]) -> _Result:
        """The result of a call that blocks and may be repeated."""
        return await repeated(lambda: self._background.run(call))

    def with_token(self, token: Callable[[_Token | None], _Token], ask: Callable[[_Token], Answer]) -> Answer:
        """The answer to a request with a token; to a second one with another token if the service does not accept the first.

        ``token`` gets the token that was refused, or None, and returns it again if there is no other. Blocks.
        """
        first = token(None)
        answer = ask(first)
        if answer.status != _UNAUTHORIZED:
            return answer
        other = token(first)
        return ask(other) if other != first else answer

    def attempt(self, method: str, url: str, headers: Mapping[str, str], body: Buffer, about: str) -> Answer:
        """The answer, whatever its status. Blocks. Raises ``Unavailable`` if no request left, else ``OutcomeUnknown``."""
        sent: Any = None
        if body:
            headers = {**headers, "Content-Length": str(len(body))}
            sent = _pieces(body)
        try:
            answer = self._pool.request(method, url, headers=headers, body=sent, redirect=False)
        except _NEVER_LEFT as failure:
            raise Unavailable(f"{self._place} cannot be reached: {type(failure).__name__}") from None
        except HTTPError as failure:
            raise OutcomeUnknown(f"{self._place} did not answer about {about}: {type(failure).__name__}") from None
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Answer(status=answer.status, headers=headers, body=answer.data)

    def close(self) -> None:
        self._pool.clear()


async def delete_each(keys: Sequence[str], delete: Callable[[str], Awaitable[None]]) -> None:
    """Delete some objects at a time. Raises ``Locked`` for what is locked, after all others.

    Any other error is that of the first of those that were deleted together, after all of them.
    """

    async def some(batch: Sequence[str]) -> None:
        outcomes = await asyncio.gather(*map(delete, batch), return_exceptions=True)
        locked = {key: each for key, each in zip(batch, outcomes, strict=True) if isinstance(each, Locked)}
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, Locked):
                raise outcome
        for first in locked.values():
            raise Locked(first.message, until_ms=first.detail["until_ms"], keys=[*locked])

    await delete_batches(keys, _DELETIONS_AT_ONCE, some)


def _pieces(body: Buffer) -> Iterator[memoryview]:
    """``body`` in small pieces: urllib3 allows each of them as long as a connection may take to open."""
    view = memoryview(body)
    for first in range(0, len(view), _PIECE_BYTES):
        yield view[first : first + _PIECE_BYTES]
