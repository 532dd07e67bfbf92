"""One node of the metadata quorum."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from stratalog.roles.priority import take_turns
from stratalog.roles.readiness import check_metadata_node
from stratalog.roles.runtime import Node
from stratalog_metadata.node.config import SECTION, MetadataSettings
from stratalog_metadata.node.server import MetadataServer


async def start(node: Node) -> str:
    """Start the node. Returns the address it listens on."""
    take_turns(node.settings.turn_us)
    settings = node.configuration.section(MetadataSettings, SECTION)
    files = await node.files(Path(settings.data_dir))
    await node.serve_http()
    server = MetadataServer(
        settings,
        node.transport,
        files,
        node.clock,
        node.random,
        # One thread for its log, one for its state.
        node.background(2, "metadata"),
    )
    node.metrics.add_source(server.metrics)
    await server.start()
    node.closing(server.close)
    node.serving_when(partial(check_metadata_node, node.transport, server.address))
    node.watching(lambda: server.failure)
    return server.address
