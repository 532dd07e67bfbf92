"""Waits until this broker's view of the metadata shows something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stratalog_metadata.client.api import MetadataView


async def wait_until(view: MetadataView, condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return True as soon as ``condition`` holds, which is asked after each change of the view; False after ``timeout_s``."""
    changed = asyncio.Event()
    unsubscribe = view.subscribe(lambda _: changed.set())
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        return False
    finally:
        unsubscribe()
    return True
