"""What a handler module declares: its API, the versions served, and the handler with the services that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, get_type_hints

from stratalog_broker.requests.access import Access

Handle = Callable[..., Awaitable[Any]] | type[Any]
"""``(context, request entity) -> response entity (or its bytes)``, both of the context's version. What it raises closes the
connection and is logged: expected failures are answered with error codes."""


class Waiting(Protocol):
    """A request that waits without a task of its own, until it calls ``context.respond`` or ``context.fail``."""

    def cancel(self) -> None:
        """The client is gone: release what is held."""
        ...


HandleRaw = Callable[..., Waiting | None] | type[Any]
"""``(context, request body) -> Waiting | None``; the handler calls ``context.respond`` itself, now or later. The next request
of the connection is handled after a returned ``Waiting`` has been answered."""
Services = Mapping[type[Any], object]
"""The parts of a broker that handlers may ask for, by the type that they name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerInfo:
    """One API: its key, the versions served, and its handler, which is either ``handle`` or ``handle_raw``.

    A handler is a function, whose keyword-only parameters are the services that it needs, or a class, which is made once with
    them and called with each request. ``advertised_min_version`` differs from ``min_version`` only where old clients need
    to see more than is served.
    """

    key: int
    min_version: int
    max_version: int
    access: Access | None
    """The permission that a client needs; None for what clients may ask before they have authenticated."""
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

    def bound_to(self, services: Services) -> HandlerInfo:
        """This API with a handler that has its services. Raises ``LookupError`` if it asks for one that does not exist."""
        if self.handle is not None:
            return replace(self, handle=_bound(self.handle, services))
        assert self.handle_raw is not None, f"API {self.key} has no handler"
        return replace(self, handle_raw=_bound(self.handle_raw, services))


def needs_of(handler: Callable[..., Any]) -> dict[str, type[Any]]:
    """Names and types of the services that a handler asks for."""
    hints = get_type_hints(vars(handler)["__init__"] if isinstance(handler, type) else handler)
    parameters = inspect.signature(handler).parameters.values()
    return {each.name: hints[each.name] for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def _bound(handler: Callable[..., Any], services: Services) -> Callable[..., Any]:
    needs = {name: services[wanted] for name, wanted in needs_of(handler).items()}
    if isinstance(handler, type):
        called: Callable[..., Any] = handler(**needs).__call__  # a bound method is cheaper to call than the object
        return called
    return partial(handler, **needs) if needs else handler
