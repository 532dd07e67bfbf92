"""Runs a role's background loop again after an error that nobody expected.

A task that ends with an exception says so only when somebody awaits it. The loops of a role are awaited when the role stops, so
a loop that an unexpected error had ended would be missing until then, and nothing would say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

_log = logging.getLogger(__name__)
RESTART_PAUSE_S: Final = 5.0


async def restarting(run: Callable[[], Awaitable[None]], name: str, pause_s: float = RESTART_PAUSE_S) -> None:
    """Run until ``run`` returns. An error of it is logged with its traceback, and it is run again after a pause."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    while True:
        try:
            await run()
            return
        except Exception:
            if asyncio.current_task(loop) is not task:
                raise  # The task was discarded: its coroutine is being closed, and a clean-up within it awaits.
            _log.exception("%s ended unexpectedly and starts again in %s s", name, pause_s)
        await asyncio.sleep(pause_s)
