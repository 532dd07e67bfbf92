"""Chooses free loopback ports below the range that systems use for outgoing connections.

A port in that range could be taken by any client's connection while its server is down, and the server could not restart.
``STRATALOG_LOCAL_PORTS=FIRST-LAST`` sets another range: several users of one machine, or test processes, take one each.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Collection

from stratalog_core.errors import Invalid, Unavailable
from stratalog_core.natural_numbers import natural_number

VARIABLE = "STRATALOG_LOCAL_PORTS"
_DEFAULT = "20000-31999"
_ATTEMPTS_MAX = 1000


def free_ports(count: int, *, taken: Collection[int] = ()) -> list[int]:
    """Return ``count`` different ports that are free and not in ``taken``. Raises ``Unavailable``, ``Invalid``."""
    first, last = _range(os.environ.get(VARIABLE) or _DEFAULT)
    chosen: list[int] = []
    for _ in range(_ATTEMPTS_MAX):
        if len(chosen) == count:
            return chosen
        port = random.randint(first, last)
        if port not in chosen and port not in taken and is_free(port):
            chosen.append(port)
    raise Unavailable(f"only {len(chosen)} of {count} ports are free on 127.0.0.1 from {first} to {last}: stop other servers")


def _range(text: str) -> tuple[int, int]:
    first, last = (natural_number(port, 65535) for port in text.partition("-")[::2])
    if first is None or last is None or not 1024 <= first <= last:
        raise Invalid(f"{VARIABLE} is {text!r}; use FIRST-LAST, from 1024 to 65535: {_DEFAULT}")
    return first, last


def is_free(port: int) -> bool:
    """Return whether a server can listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
