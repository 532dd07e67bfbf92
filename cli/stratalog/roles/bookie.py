"""One bookie over one or several disks."""

from __future__ import annotations

from pathlib import Path

from stratalog.roles.runtime import Node
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.server import BookieServer


async def start(node: Node) -> str:
    """Start the bookie and register it; the address it listens on."""
    settings = node.configuration.section(BookieSettings, "bookie")
    server = BookieServer(
        settings,
        await node.metadata(),
        node.transport,
        [node.files(Path(directory)) for directory in settings.data_dirs],
        node.clock,
        node.random,
        node.background(settings.threads, "bookie"),
    )
    await server.start()
    node.closing(server.close)
    return server.address
