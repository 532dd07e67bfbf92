"""How S3 requests are attempted: retries, the outcome when no attempt was answered, and time limits.

``repeated`` is for requests that may be sent twice; ``written_once`` for writes that take effect at most once. Both return a
definite outcome or raise ``OutcomeUnknown``.
"""

from __future__ import annotations

import asyncio
from asyncio import sleep
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, TypeVar

from stratalog_core.errors import NoSuchObject, OutcomeUnknown, StratalogError, Unavailable
from stratalog_tiering.store.base import Throttled

ATTEMPTS_MAX: Final = 4
_FIRST_PAUSE_S: Final = 0.1
_THROTTLED_PAUSE_S: Final = 1.0
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
        await sleep(_THROTTLED_PAUSE_S * 2**attempt if isinstance(failure, Throttled) else _FIRST_PAUSE_S * 3**attempt)
    elif doubtful:
        raise OutcomeUnknown(failure.message) from failure
    else:
        raise Unavailable(failure.message) from failure


class time_limit:  # noqa: N801 - used like asyncio.timeout
    """Raise ``TimeoutError`` after ``limit_s``, counted from the start or from the last call of the function it gives.

    Only time in which the event loop runs counts. ``asyncio.timeout`` compares clocks: after the process was stopped or
    computed for long, it discards a response that has already arrived. Here the limit passes in steps, a pause of the loop
    counts as one step, and the loop polls its sockets between two steps.

    Nothing refers to the task after the end. A cycle of references would keep the task's result, a block of a segment, until
    the garbage collector runs, which is rare: replays held hundreds of megabytes, and read into new memory each time.
    """

    __slots__ = ("_limit_s", "_loop", "_steps_left", "_timeout", "_timer")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._steps_left = _TIME_LIMIT_STEPS
        self._timer: asyncio.TimerHandle | None = None
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> Callable[[], None]:
        self._timeout = await asyncio.timeout(None).__aenter__()
        self._step()
        return self._restart

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout, timer = self._timeout, self._timer
        self._timeout = self._timer = None
        if timer is not None:
            timer.cancel()
        assert timeout is not None, "entered before"
        await timeout.__aexit__(kind, failure, trace)

    def _restart(self) -> None:
        self._steps_left = _TIME_LIMIT_STEPS

    def _step(self) -> None:
        if self._timeout is None:
            return
        if self._steps_left == 0:
            self._timeout.reschedule(self._loop.time())
            return
        self._steps_left -= 1
        self._timer = self._loop.call_later(self._limit_s / _TIME_LIMIT_STEPS, self._step)
