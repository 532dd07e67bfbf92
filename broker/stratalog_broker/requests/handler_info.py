"""How an API is described in the handler table."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from stratalog_broker.requests.context import RequestContext

Handle = Callable[[RequestContext, Any], Awaitable[Any]]
"""Request entity in, response entity (or its bytes) out, both of the context's version. What it raises closes the connection
and is logged: expected failures are answered with error codes."""


class Waiting(Protocol):
    """A request that waits without a task of its own, until it calls ``context.respond`` or ``context.fail``."""

    def cancel(self) -> None:
        """Nobody is there to be answered any more: release what is held."""
        ...


HandleRaw = Callable[[RequestContext, memoryview], Waiting | None]
"""Request body in; the handler calls ``context.respond`` itself, at once or later. If it returns something, that is waited for
before the connection's next request is handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerInfo:
    """One API: its key, the versions served, and its handler, which is either ``handle`` or ``handle_raw``.

    ``advertised_min_version`` differs from ``min_version`` only where old clients need to see more than is served.
    """

    key: int
    min_version: int
    max_version: int
    handle: Handle | None = None
    handle_raw: HandleRaw | None = None
    advertised_min_version: int | None = None
    ends_with_client: bool = False
    """The request changes nothing and may be costly: it is cancelled when its client has gone."""

    @property
    def name(self) -> str:
        """Kafka's name of the API."""
        module = inspect.getmodule(self.handle or self.handle_raw)
        assert module is not None
        return "".join(word.capitalize() for word in module.__name__.rpartition(".")[2].split("_"))

    @property
    def lowest_advertised(self) -> int:
        return self.min_version if self.advertised_min_version is None else self.advertised_min_version
