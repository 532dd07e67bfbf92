"""One bookie over one or several disks."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from stratalog.roles.priority import take_turns
from stratalog.roles.readiness import check_bookie
from stratalog.roles.runtime import LOCK_TIMEOUT_S, Node
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk.missing_disk import MissingFiles
from stratalog_bookies.node.server import BookieServer
from stratalog_core.ports import Files


async def start(node: Node) -> str:
    """Start the bookie and register it. Returns the address it listens on."""
    take_turns(node.settings.turn_us)
    settings = node.configuration.section(BookieSettings, "bookie")
    limit_s = settings.disk_stall_ms / 1000 + LOCK_TIMEOUT_S
    disks = await asyncio.gather(*(_files(node, directory, limit_s) for directory in settings.data_dirs))
    await node.serve_http()
    server = BookieServer(
        settings,
        await node.metadata(),
        node.transport,
        disks,
        node.clock,
        node.random,
        node.background(settings.threads, "bookie"),
    )
    node.metrics.add_source(server.metrics)
    await server.start()
    node.closing(server.close)
    node.serving_when(partial(check_bookie, node.transport, server.address, settings.bookie_id, node.read_record))
    return server.address


async def _files(node: Node, directory: str, limit_s: float) -> Files:
    """Return a locked disk, or a missing one if its directory cannot be created or it hangs, which the bookie may survive.

    Raises ``Conflict``.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await node.files(Path(directory))
    except TimeoutError:
        return MissingFiles(f"{directory}: the disk hangs: it was not locked in {limit_s:.0f} s")
    except OSError as failure:
        return MissingFiles(f"{directory}: {failure}")
