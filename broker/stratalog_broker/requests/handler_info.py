"""The declaration of a handler module: its API, the versions served, and the handler with the services that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, get_type_hints

from stratalog_broker.requests.access import Access

Handle = Callable[..., Awaitable[Any]] | type[Any]
"""``(context, request entity) -> response entity (or its bytes)``, both of the context's version. Expected failures are
answered with error codes; an exception is logged and closes the connection."""


class Waiting(Protocol):
    """A parked request that has no task; it ends by calling ``context.respond`` or ``context.fail``."""

    def cancel(self) -> None:
        """Release everything the request holds; called when the client is gone."""
        ...


HandleRaw = Callable[..., Waiting | None] | type[Any]
"""``(context, request body) -> Waiting | None``; the handler calls ``context.respond`` itself, now or later. The connection's
next request is handled after a returned ``Waiting`` has been answered."""
Services = Mapping[type[Any], object]
"""The parts of a broker that handlers may request, by type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerInfo:
    """One API: its key, the versions served, and its handler, which is either ``handle`` or ``handle_raw``.

    A handler is a function whose keyword-only parameters are the services that it needs, or a class that is instantiated once
    with them and called with each request. ``advertised_min_version`` differs from ``min_version`` only where old clients
    require an older version to be advertised than is served.
    """

    key: int
    min_version: int
    max_version: int
    access: Access | None
    """The operation and the kind of resource for whose names the handler asks ``Permissions``. None for requests that are
    allowed before authentication. DescribeCluster asks for none, as in Kafka: every client needs its answer."""
    handle: Handle | None = None
    handle_raw: HandleRaw | None = None
    advertised_min_version: int | None = None
    is_advertised: bool = True
    """Whether ApiVersions lists it; brokers send each other requests that it does not list."""
    needs_quorum: bool = False
    """Whether the API is about the metadata quorum, which the server of an archive does not have."""
    ends_with_client: bool = False
    """Whether the request is cancelled when its client disconnects: for requests that change nothing and may be costly."""

    @property
    def name(self) -> str:
        """Kafka's name for the API, derived from the handler's module name."""
        module = inspect.getmodule(self.handle or self.handle_raw)
        assert module is not None
        return "".join(word.capitalize() for word in module.__name__.rpartition(".")[2].split("_"))

    @property
    def lowest_advertised(self) -> int:
        return self.min_version if self.advertised_min_version is None else self.advertised_min_version

    def bound_to(self, services: Services) -> HandlerInfo:
        """Return this API with its handler bound to its services. Raises ``LookupError`` if one of them does not exist."""
        if self.handle is not None:
            return replace(self, handle=_bound(self.handle, services))
        assert self.handle_raw is not None, f"API {self.key} has no handler"
        return replace(self, handle_raw=_bound(self.handle_raw, services))


def needs_of(handler: Callable[..., Any]) -> dict[str, type[Any]]:
    """Return the names and types of the services that a handler needs."""
    hints = get_type_hints(vars(handler)["__init__"] if isinstance(handler, type) else handler)
    parameters = inspect.signature(handler).parameters.values()
    return {each.name: hints[each.name] for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def _bound(handler: Callable[..., Any], services: Services) -> Callable[..., Any]:
    needs = {name: services[wanted] for name, wanted in needs_of(handler).items()}
    if isinstance(handler, type):
        called: Callable[..., Any] = handler(**needs).__call__  # a bound method is cheaper to call than the object
        return called
    return partial(handler, **needs) if needs else handler
