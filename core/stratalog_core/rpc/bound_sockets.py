"""Prepares TCP sockets: binds them without listening, so that the port is reserved, and lets connections to dead hosts end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import Any, Final

from stratalog_core.errors import Conflict

UNTAKEN_MS_MAX: Final = 10_000
_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", None)


async def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Bind one socket for each address of ``host``. Raises ``Conflict`` if another process listens there, ``OSError``
    otherwise.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, *_, address in dict.fromkeys(found):
            sockets.append(_bind(family, address))
    except OSError as failure:
        close_sockets(sockets)
        raise _named(f"{host}:{port}", failure) from failure
    return sockets


def listen_on(sockets: Sequence[socket.socket], backlog: int = 128) -> None:
    """Start to listen. Raises ``Conflict``, because two processes can bind one port as long as neither listens.

    The event loop could do this, but uvloop never releases a socket on which listening failed.
    """
    for bound in sockets:
        try:
            bound.listen(backlog)
        except OSError as failure:
            host, port, *_ = bound.getsockname()
            raise _named(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", failure) from failure


def end_if_untaken(transport: asyncio.BaseTransport) -> None:
    """End a connection whose peer has taken nothing of what was sent to it for ``UNTAKEN_MS_MAX`` (Linux only).

    A machine that loses power, or gets another address, ends no connection. The system would send again for a quarter of an
    hour, at intervals that grow to two minutes, and nobody would connect to the machine that is back. A process that is merely
    slow still takes what fits into its socket.
    """
    connected = transport.get_extra_info("socket")
    if connected is not None and _USER_TIMEOUT is not None:
        connected.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, UNTAKEN_MS_MAX)


def close_sockets(sockets: list[socket.socket]) -> None:
    """Close all sockets and empty the list."""
    while sockets:
        sockets.pop().close()


def _bind(family: int, address: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier process that are still closing must not block the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def _named(address: str, failure: OSError) -> Exception:
    if failure.errno != errno.EADDRINUSE:
        return failure
    return Conflict(f"{address} is in use by another process: stop that process, or listen on another port")
