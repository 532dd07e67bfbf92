"""Addresses of processes, written ``HOST:PORT``."""

from __future__ import annotations

from stratalog_core.errors import Invalid
from stratalog_core.natural_numbers import natural_number


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``. IPv6 hosts may be in brackets. Raises ``Invalid``."""
    host, colon, text = address.rpartition(":")
    port = natural_number(text, 65535)
    if not colon or not host or port is None:
        raise Invalid(f"address {address!r} is not HOST:PORT")
    host = host.strip("[]")
    try:
        host.encode("idna")
    except UnicodeError as malformed:
        raise Invalid(f"address {address!r} has no valid host name: {malformed}") from malformed
    return host, port
