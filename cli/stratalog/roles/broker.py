"""One stateless broker: Kafka's protocol in front, ledgers and the cold reader behind."""

from __future__ import annotations

from stratalog.roles.runtime import Node


async def start(node: Node) -> str:
    """Start the broker and register it; the address of its Kafka listener."""
    raise NotImplementedError
