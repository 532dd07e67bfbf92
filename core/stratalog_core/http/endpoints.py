"""The HTTP responses of a process: metrics, liveness and readiness.

Metrics are rendered and readiness is checked at most once per ``FRESH_S``, however many clients ask; the others get the same
response. Rendering lets other tasks run after each piece of text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from stratalog_core.errors import StratalogError
from stratalog_core.metrics.registry import Registry
from stratalog_core.ports import Clock
from stratalog_core.single_flight import SingleFlight

FRESH_S: Final = 1.0
READY_TIMEOUT_S: Final = 3.0
_TEXT: Final = "text/plain; charset=utf-8"

Ready = Callable[[float], Awaitable[str]]
"""Checks readiness within a timeout in seconds; returns a text for the response. Raises ``StratalogError``, ``TimeoutError``
or ``OSError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP response: a status, a body and its type."""

    status: int
    body: bytes
    content_type: str = _TEXT


class Endpoints:
    """Answers requests by path."""

    def __init__(self, registry: Registry, ready: Ready, clock: Clock) -> None:
        self._registry = registry
        self._ready = ready
        self._clock = clock
        self._flight: SingleFlight[str, Answer] = SingleFlight()
        self._fresh: dict[str, tuple[float, Answer]] = {}
        self._paths: dict[str, Callable[[], Awaitable[Answer]]] = {"/metrics": self._metrics, "/readyz": self._readiness}

    async def answer(self, path: str) -> Answer:
        """Return the response to GET ``path``."""
        if path == "/healthz":
            return Answer(status=200, body=b"alive\n")
        make = self._paths.get(path)
        if make is None:
            return Answer(status=404, body=b"paths are /metrics, /healthz and /readyz\n")
        made_at, answer = self._fresh.get(path, (-FRESH_S, None))
        if answer is not None and self._clock.monotonic() < made_at + FRESH_S:
            return answer
        return await self._flight.get(path, lambda: self._made(path, make), keep=True)

    async def close(self) -> None:
        await self._flight.close()

    async def _made(self, path: str, make: Callable[[], Awaitable[Answer]]) -> Answer:
        answer = await make()
        self._fresh[path] = (self._clock.monotonic(), answer)
        return answer

    async def _metrics(self) -> Answer:
        library: Any = await asyncio.to_thread(import_module, "stratalog_core.http.exposition")
        texts: Iterator[bytes] = library.exposition(self._registry)
        parts = []
        for text in texts:
            parts.append(text)
            await asyncio.sleep(0)
        return Answer(status=200, body=b"".join(parts), content_type=library.CONTENT_TYPE)

    async def _readiness(self) -> Answer:
        try:
            detail = await asyncio.wait_for(self._ready(READY_TIMEOUT_S), READY_TIMEOUT_S)
        except TimeoutError:
            return _refusal(f"no answer within {READY_TIMEOUT_S} s")
        except StratalogError as failure:
            return _refusal(failure.message)
        except OSError as failure:
            return _refusal(str(failure))
        return Answer(status=200, body=f"{detail}\n".encode())


def _refusal(reason: str) -> Answer:
    return Answer(status=503, body=f"{reason}\n".encode())
