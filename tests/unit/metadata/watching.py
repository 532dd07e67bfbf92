"""Waits until a quorum client's view satisfies a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from stratalog_metadata.client.quorum_client import QuorumClient

LOOK_S: Final = 0.1


async def until(client: QuorumClient, condition: Callable[[], bool], within_s: float) -> None:
    """Wait until ``condition`` holds; TimeoutError after ``within_s``.

    It is looked at after each change of the client's view, and now and then: what another process made of the last change may
    come later than the change itself.
    """
    changed = asyncio.Event()
    unsubscribe = client.view.subscribe(lambda _: changed.set())
    try:
        async with asyncio.timeout(within_s):
            while not condition():
                changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await changed.wait()
    finally:
        unsubscribe()
