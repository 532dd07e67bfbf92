"""Editing a record of metadata: read it, decide, write it on condition that it is still the one that was read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from stratalog_core.errors import Conflict

Result = TypeVar("Result")
ATTEMPTS_MAX: Final = 8
RETRY_DELAY_S: Final = 0.02


async def decided_anew(what: str, attempt: Callable[[], Awaitable[Result]]) -> Result:
    """The result of ``attempt``, which reads, decides and writes; called again when another writer was faster.

    Raises ``Conflict`` when ``what`` keeps changing.
    """
    for number in range(1, ATTEMPTS_MAX + 1):
        try:
            return await attempt()
        except Conflict:
            await asyncio.sleep(RETRY_DELAY_S * number)
    raise Conflict(f"{what} kept changing under {ATTEMPTS_MAX} attempts")
