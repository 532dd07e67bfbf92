"""Chooses free loopback ports below the range that systems use for outgoing connections.

A port in that range could be taken by any client's connection while its server is down, and the server could not restart.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

from stratalog_core.errors import Unavailable

_FIRST, _LAST = 20000, 31999
_ATTEMPTS_MAX = 1000


def free_ports(count: int, *, taken: Collection[int] = ()) -> list[int]:
    """Return ``count`` different ports that are free and not in ``taken``. Raises ``Unavailable``."""
    chosen: list[int] = []
    for _ in range(_ATTEMPTS_MAX):
        if len(chosen) == count:
            return chosen
        port = random.randint(_FIRST, _LAST)
        if port not in chosen and port not in taken and is_free(port):
            chosen.append(port)
    raise Unavailable(f"only {len(chosen)} of {count} ports are free on 127.0.0.1 from {_FIRST} to {_LAST}: stop other servers")


def is_free(port: int) -> bool:
    """Return whether a server can listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
