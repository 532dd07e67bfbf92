"""Implements ``Channel.call`` by ``send``, for the real transport and for simulated ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stratalog_core.errors import StratalogError
from stratalog_core.ports import Buffer, Channel


async def call_by_send(channel: Channel, method: int, parts: Sequence[Buffer], timeout_s: float) -> memoryview:
    """Send a request and return its reply. Raises the error if the reply is one."""
    future: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

    def settle(answer: memoryview | StratalogError) -> None:
        if future.done():
            return
        if isinstance(answer, StratalogError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    channel.send(method, parts, settle, timeout_s)
    return await future
