"""How S3 requests are attempted: retries, the outcome when no attempt was answered, and time limits.

``repeated`` is for requests that may be sent twice; ``written_once`` for writes that take effect at most once. Both return a
definite outcome or raise ``OutcomeUnknown``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from stratalog_core.errors import NoSuchObject, OutcomeUnknown, StratalogError, Unavailable

ATTEMPTS_MAX: Final = 4
_FIRST_PAUSE_S: Final = 0.1
_TIME_LIMIT_STEPS: Final = 16
_Result = TypeVar("_Result")


async def repeated(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """The result of an idempotent call. Raises ``Unavailable`` if no attempt was answered."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            return await call()
        except (OutcomeUnknown, Unavailable) as failure:
            await _pause_or_raise(attempt, failure, doubtful=False)
    raise AssertionError("unreachable")


async def written_once(
    write: Callable[[], Awaitable[None]], is_ours: Callable[[], Awaitable[bool]], *, lost_to: tuple[type[StratalogError], ...]
) -> None:
    """Send a write that takes effect at most once, however often it is sent.

    ``lost_to`` are the errors with which the store refuses a second write. After an unanswered attempt they may refer to that
    attempt, so ``is_ours`` compares the stored object with this write. Raises ``Unavailable`` if no attempt took effect,
    ``OutcomeUnknown`` if one may have.
    """
    doubtful = False
    for attempt in range(ATTEMPTS_MAX):
        try:
            return await write()
        except lost_to as refused:
            if doubtful and await _found_ours(is_ours):
                return None
            raise refused
        except (OutcomeUnknown, Unavailable) as failure:
            doubtful = doubtful or isinstance(failure, OutcomeUnknown)
            await _pause_or_raise(attempt, failure, doubtful=doubtful)
    raise AssertionError("unreachable")


async def _found_ours(is_ours: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await is_ours()
    except NoSuchObject:
        return False
    except Unavailable as failure:
        raise OutcomeUnknown(failure.message) from failure


async def _pause_or_raise(attempt: int, failure: OutcomeUnknown | Unavailable, *, doubtful: bool) -> None:
    """Wait before the next attempt. After the last one raise ``OutcomeUnknown`` if any attempt may have taken effect."""
    if attempt + 1 < ATTEMPTS_MAX:
        await asyncio.sleep(_FIRST_PAUSE_S * 3**attempt)
    elif doubtful:
        raise OutcomeUnknown(failure.message) from failure
    else:
        raise Unavailable(failure.message) from failure


@asynccontextmanager
async def time_limit(limit_s: float) -> AsyncIterator[Callable[[], None]]:
    """Raise ``TimeoutError`` after ``limit_s``, counted from the start or from the last call of the yielded function.

    Only time in which the event loop runs counts. ``asyncio.timeout`` compares clocks: after the process was stopped or
    computed for long, it discards a response that has already arrived. Here the limit passes in steps, a pause of the loop
    counts as one step, and the loop polls its sockets between two steps.
    """
    loop, steps_left = asyncio.get_running_loop(), _TIME_LIMIT_STEPS
    timer: asyncio.TimerHandle | None = None

    def restart() -> None:
        nonlocal steps_left
        steps_left = _TIME_LIMIT_STEPS

    def step() -> None:
        nonlocal steps_left, timer
        if steps_left == 0:
            timeout.reschedule(loop.time())
            return
        steps_left -= 1
        timer = loop.call_later(limit_s / _TIME_LIMIT_STEPS, step)

    async with asyncio.timeout(None) as timeout:
        step()
        try:
            yield restart
        finally:
            if timer is not None:
                timer.cancel()
