"""Addresses of processes, written ``HOST:PORT``."""

from __future__ import annotations

from stratalog_core.errors import Invalid


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``. IPv6 hosts may be in brackets. Raises ``Invalid``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise Invalid(f"address {address!r} is not HOST:PORT")
    host = host.strip("[]")
    try:
        host.encode("idna")
    except UnicodeError as malformed:
        raise Invalid(f"address {address!r} has no valid host name: {malformed}") from malformed
    return host, int(port)
