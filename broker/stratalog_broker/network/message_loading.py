"""Imports the modules of every served API version before the first client needs them.

kio has modules for each message and version, and the first request of a version imports three of them. That blocks the
event loop for 5 to 27 ms, during which nothing is acknowledged: it happened at a new client's first request and at a
group's first heartbeat and commit. Loading all versions takes a second of CPU and 13 MB, so it runs in a thread that gives
way to the event loop, with pauses, because a broker that has just started is busy.
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
"""Pause between two versions; loading then takes an eighth of a core for eight seconds."""


async def load_messages(background: Background, *, pause_s: float = _PAUSE_S) -> None:
    """Load all versions that ``HANDLERS`` serves, one at a time; takes about eight seconds. May be cancelled at any time."""
    for info in HANDLERS.values():
        for version in range(info.min_version, info.max_version + 1):
            await background.run(partial(_load, info.key, version))
            await asyncio.sleep(pause_s)


def _load(api_key: int, api_version: int) -> None:
    is_flexible(api_key, api_version)
    load_message(api_key, api_version)
