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
    disks = await lock_disks(node, settings)
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


async def lock_disks(node: Node, settings: BookieSettings) -> list[Files]:
    """Return the disks, locked. Raises ``Conflict``.

    One that cannot be created or hangs is missing, which the bookie may survive. While all of them hang, this waits.
    """
    locking = [asyncio.ensure_future(_files(node, directory)) for directory in settings.data_dirs]
    await asyncio.wait(locking, return_when=asyncio.FIRST_COMPLETED)
    limit_s = settings.disk_stall_ms / 1000 + LOCK_TIMEOUT_S
    locked, hanging = await asyncio.wait(locking, timeout=limit_s)
    for lock in hanging:
        lock.cancel()
    in_use = [failure for lock in locked if (failure := lock.exception()) is not None]
    if in_use:
        raise in_use[0]
    return [
        MissingFiles(f"{directory}: the disk hangs: it was not locked in {limit_s:.0f} s") if lock in hanging else lock.result()
        for directory, lock in zip(settings.data_dirs, locking, strict=True)
    ]


async def _files(node: Node, directory: str) -> Files:
    try:
        return await node.files(Path(directory))
    except OSError as failure:
        return MissingFiles(f"{directory}: {failure}")
