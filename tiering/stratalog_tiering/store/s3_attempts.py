"""Attempts at S3 requests: how often, how long between them, and what remains to be said when none succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from stratalog_core.errors import OutcomeUnknown, Unavailable

ATTEMPTS_MAX: Final = 4
_FIRST_PAUSE_S: Final = 0.1
_Result = TypeVar("_Result")


async def repeated(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """A call that does no harm when it is done twice. Raises ``Unavailable`` when no attempt had an answer."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            return await call()
        except (OutcomeUnknown, Unavailable) as failure:
            await pause_or_raise(attempt, failure, doubtful=False)
    raise AssertionError("unreachable")


async def pause_or_raise(attempt: int, failure: OutcomeUnknown | Unavailable, *, doubtful: bool) -> None:
    """Wait before the next attempt; after the last raise ``OutcomeUnknown`` if one of them may have taken effect."""
    if attempt + 1 < ATTEMPTS_MAX:
        await asyncio.sleep(_FIRST_PAUSE_S * 3**attempt)
    elif doubtful:
        raise OutcomeUnknown(failure.message) from failure
    else:
        raise Unavailable(failure.message) from failure
