"""A real server in this process for as long as the process lives, and what must hold of it after every hostile client."""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Generic, Protocol, TypeVar

ANSWER_S = 0.05
"""How long a client waits for an answer: some requests may honestly take longer, and are then given up."""
LIFE_S = 30.0


class Running(Protocol):
    """A started server."""

    async def attack(self, content: bytes) -> None:
        """Be one hostile client."""
        ...

    async def check(self) -> None:
        """Raise unless the server still serves honest ones."""
        ...

    @property
    def is_worn(self) -> bool:
        """Whether it holds so much by now that a new one should take over."""
        ...


Server = TypeVar("Server", bound=Running)


class Failures(logging.Handler):
    """Unhandled failures: log records of level ERROR, and calls of the event loop's exception handler."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))

    def unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(f"{context.get('message')}: {context.get('exception')!r}")


class Served(Generic[Server]):
    """Starts a server at the first input. ``content`` of a run is one client's whole life."""

    def __init__(self, start: Callable[[Path], AbstractAsyncContextManager[Server]]) -> None:
        self._start = start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._directory = Path()
        self._context: AbstractAsyncContextManager[Server] | None = None
        self._server: Server | None = None
        self._failures = Failures()

    def run(self, content: bytes) -> None:
        server = self._started()
        self.wait_for(self._attack(server, content))
        if server.is_worn:
            self.close()

    async def _attack(self, server: Server, content: bytes) -> None:
        async with asyncio.timeout(LIFE_S):
            await server.attack(content)
            await server.check()
        assert not self._failures.found, f"nobody handled: {self._failures.found}"

    def _started(self) -> Server:
        if self._server is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(self._failures.unhandled)
            logging.getLogger().addHandler(self._failures)
            self._directory = Path(mkdtemp(prefix="stratalog-fuzz-"))
            self._context = self._start(self._directory)
            self._server = self.wait_for(self._context.__aenter__())
            atexit.register(self.close)
        return self._server

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        assert self._loop is not None
        return self._loop.run_until_complete(awaitable)

    def close(self) -> None:
        """Stop in good order, and start once more on what was stored: hostile clients must not have spoilt it."""
        if self._server is None or self._context is None or self._loop is None:
            return
        atexit.unregister(self.close)
        context, self._context, self._server = self._context, None, None
        try:
            self.wait_for(context.__aexit__(None, None, None))
            self.wait_for(self._restart())
            assert not self._failures.found, f"nobody handled: {self._failures.found}"
        finally:
            self._failures.found.clear()
            logging.getLogger().removeHandler(self._failures)
            self._loop.close()
            rmtree(self._directory, ignore_errors=True)

    async def _restart(self) -> None:
        async with asyncio.timeout(LIFE_S), self._start(self._directory) as server:
            await server.check()
