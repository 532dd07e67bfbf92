"""A bookie that stops answers what it has accepted and refuses the rest, however much keeps coming."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from unit.bookies.hanging_disk import HangingFiles
from unit.bookies.node.test_server import OK, Place, Talk, place, until

from stratalog_bookies.node.server import BookieServer
from stratalog_core.errors import Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground

_ = place


async def is_stopping(bookie: Talk) -> bool:
    try:
        await bookie.info()
    except Unavailable:
        return True
    return False


async def test_a_bookie_that_stops_refuses_what_would_keep_it_from_stopping(place: Place) -> None:
    background = ThreadBackground(place.settings.threads, "bookie")
    hanging = HangingFiles(SystemFiles(Path(place.settings.data_dirs[0])))
    disks: list[Any] = [hanging]
    server = BookieServer(place.settings, place.quorum.client, place.transport, disks, SystemClock(), Random(1), background)
    await server.start()
    client = TcpTransport()
    bookie = Talk(client.channel(server.address))
    try:
        assert await bookie.add((1, 0, b"before")) == [OK]
        hanging.works.clear()
        accepted = asyncio.ensure_future(bookie.add((1, 1, b"accepted")))
        await bookie.info()
        closing = asyncio.ensure_future(server.close())
        async with asyncio.timeout(10):
            await until(partial(is_stopping, bookie))
        with pytest.raises(Unavailable, match="the bookie is stopping"):
            await bookie.add((1, 2, b"too late"))
    finally:
        hanging.works.set()
    assert await accepted == [OK]
    await closing
    await client.close()
    background.close()
    async with place.bookie() as again:
        assert await again.entries(1) == {0: b"before", 1: b"accepted"}
