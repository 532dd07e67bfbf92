"""Requests that obstore does not offer, to Azure and Google Cloud: one attempt each, by urllib3, in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_core.ports import Buffer
from stratalog_tiering.store.obstore_reads import CONNECT_TIMEOUT_S

REQUEST_TIMEOUT_S: Final = 30.0
_PIECE_BYTES: Final = 64 * 1024
_NEVER_LEFT: Final = (NewConnectionError, ConnectTimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpRequests:
    """``place`` is the store's address for error messages, which never repeat a URL: it may hold a secret."""

    def __init__(self, place: str, threads: int) -> None:
        self._place = place
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=REQUEST_TIMEOUT_S)
        self._pool = urllib3.PoolManager(maxsize=threads, block=True, retries=False, timeout=timeout)

    def send(self, method: str, url: str, headers: Mapping[str, str], body: Buffer, about: str) -> Answer:
        """The answer, whatever its status. Raises ``Unavailable`` if the request was never sent, else ``OutcomeUnknown``."""
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


def _pieces(body: Buffer) -> Iterator[memoryview]:
    """``body`` in small pieces: urllib3 allows each of them as long as a connection may take to open."""
    view = memoryview(body)
    for first in range(0, len(view), _PIECE_BYTES):
        yield view[first : first + _PIECE_BYTES]
