"""The identity of a client."""

from __future__ import annotations

from typing import Final, NamedTuple


class Principal(NamedTuple):
    """As Kafka writes it: ``User:alice``."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


ANONYMOUS: Final = Principal("User", "ANONYMOUS")
"""A client of a listener without authentication."""
