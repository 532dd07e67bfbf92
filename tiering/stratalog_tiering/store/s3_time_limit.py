"""A time limit that counts only the time in which the event loop runs.

``asyncio.timeout`` compares clocks. When the loop stands still (a stopped process, a long computation), the limit passes
although nobody could take the answer, and an answer that has arrived is thrown away. Here a limit passes in steps, and a
pause of the loop counts as one step however long it is. Between two steps the loop has looked at its sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

_STEPS: Final = 16


@asynccontextmanager
async def time_limit(limit_s: float) -> AsyncIterator[Callable[[], None]]:
    """Raises ``TimeoutError`` after ``limit_s``, counted from the beginning or the last call of what it yields."""
    loop, steps_left = asyncio.get_running_loop(), _STEPS
    timer: asyncio.TimerHandle | None = None

    def restart() -> None:
        nonlocal steps_left
        steps_left = _STEPS

    def step() -> None:
        nonlocal steps_left, timer
        if steps_left == 0:
            timeout.reschedule(loop.time())
            return
        steps_left -= 1
        timer = loop.call_later(limit_s / _STEPS, step)

    async with asyncio.timeout(None) as timeout:
        step()
        try:
            yield restart
        finally:
            if timer is not None:
                timer.cancel()
