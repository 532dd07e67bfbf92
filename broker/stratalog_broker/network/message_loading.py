"""Imports what Kafka's messages need in every version that is served, before the first client asks.

kio has modules for each message and version, and the first request of a version imports three of them: 5 to 27 ms on the
event loop, during which nothing is acknowledged. A new client, a group's first heartbeat or its first commit was such a
moment. All of them together are a second of CPU and 13 MB, so they are loaded in a thread, which lets the event loop go
first, and with pauses: a broker that has just started has other things to do.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.protocol.entities import load_message
from stratalog_broker.protocol.frame import is_flexible
from stratalog_core.ports import Background

_PAUSE_S: Final = 0.05
"""Between two versions of one API: an eighth of a core for eight seconds."""


async def load_messages(background: Background, *, pause_s: float = _PAUSE_S) -> None:
    """Load all versions that ``HANDLERS`` serves, one after the other; takes some eight seconds. Cancel it at any time."""
    for info in HANDLERS.values():
        for version in range(info.min_version, info.max_version + 1):
            await background.run(partial(_load, info.key, version))
            await asyncio.sleep(pause_s)


def _load(api_key: int, api_version: int) -> None:
    is_flexible(api_key, api_version)
    load_message(api_key, api_version)
