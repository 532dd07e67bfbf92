"""Opens a store as a process does, with threads of its own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import ObjectStore, open_store


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[ObjectStore]:
    """Open the store at ``url``; close it, and its threads, at the end."""
    background = ThreadBackground(4, "store")
    store = open_store(url, background=background, clock=SystemClock(), random=random.Random())
    try:
        yield store
    finally:
        await store.close()
        background.close()
