"""The identity of a client."""

from __future__ import annotations

from typing import Final, NamedTuple


class Principal(NamedTuple):
    """A client's identity, printed as Kafka does: ``User:alice``."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


ANONYMOUS: Final = Principal("User", "ANONYMOUS")
"""The principal of clients of a listener without authentication."""
