"""Waits until a quorum client's view satisfies a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stratalog_metadata.client.quorum_client import QuorumClient


async def until(client: QuorumClient, condition: Callable[[], bool], within_s: float) -> None:
    """Wait until the client's view satisfies ``condition``, looked at after each change; TimeoutError after ``within_s``."""
    changed = asyncio.Event()
    unsubscribe = client.view.subscribe(lambda _: changed.set())
    try:
        async with asyncio.timeout(within_s):
            while not condition():
                changed.clear()
                await changed.wait()
    finally:
        unsubscribe()
