"""A broker's Kafka listeners: the addresses it binds, and the address advertised to clients of each listener.

Clients reach one broker by different addresses: from the same network, from outside, through a proxy. Each listener has a name
(usually empty for the first). A response that lists brokers contains their addresses for the listener of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stratalog_core.errors import Invalid
from stratalog_core.rpc.addresses import split_address
from stratalog_metadata.records import Endpoint

UNNAMED = ""


class Listener(NamedTuple):
    """``name`` is empty for the unnamed listener."""

    name: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """``HOST:PORT``, with an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listeners(texts: Sequence[str], setting: str) -> tuple[Listener, ...]:
    """Parse listeners written as ``HOST:PORT`` or ``NAME=HOST:PORT``.

    Raises ``Invalid`` if an address is malformed or a name is used twice.
    """
    listeners = tuple(_parse(text) for text in texts)
    names = [listener.name for listener in listeners]
    for name in names:
        if names.count(name) > 1:
            what = f"listener {name!r}" if name else "the unnamed listener"
            raise Invalid(f"{setting} has {what} twice; give each further listener a name of its own: NAME=HOST:PORT")
    return listeners


def _parse(text: str) -> Listener:
    name, named, address = text.rpartition("=")
    if named and not name.strip():
        raise Invalid(f"listener {text!r} has an empty name; write NAME=HOST:PORT, or HOST:PORT alone")
    return Listener(name.strip(), *split_address(address.strip()))


def advertised_endpoints(bound: Iterable[Listener], advertised: Sequence[str]) -> tuple[Endpoint, ...]:
    """Return the endpoints advertised to clients of the ``bound`` listeners, in the same order.

    Raises ``Invalid`` if ``advertised`` has an address for a listener that does not exist.
    """
    told = {listener.name: listener for listener in parse_listeners(advertised, "advertised")}
    endpoints = []
    for listener in bound:
        place = told.pop(listener.name, listener)
        endpoints.append(Endpoint(listener=listener.name, host=place.host, port=place.port or listener.port))
    if told:
        name = next(iter(told))
        raise Invalid(f"advertised has an address for listener {name!r}, which `listen` does not have; add it there")
    return tuple(endpoints)
