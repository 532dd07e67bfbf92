"""Attempts at S3 requests: how often, how long between them, and what remains to be said when none succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from stratalog_core.errors import NoSuchObject, OutcomeUnknown, StratalogError, Unavailable

ATTEMPTS_MAX: Final = 4
_FIRST_PAUSE_S: Final = 0.1
_Result = TypeVar("_Result")


async def repeated(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """The result of a call that does no harm when it is done twice. Raises ``Unavailable`` when no attempt had an answer."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            return await call()
        except (OutcomeUnknown, Unavailable) as failure:
            await _pause_or_raise(attempt, failure, doubtful=False)
    raise AssertionError("unreachable")


async def written_once(
    write: Callable[[], Awaitable[None]], is_ours: Callable[[], Awaitable[bool]], *, lost_to: tuple[type[StratalogError], ...]
) -> None:
    """Do a write that takes effect once, however often it is sent.

    ``lost_to`` are the errors with which the store refuses a second one. After an attempt without an answer they prove
    nothing, and ``is_ours`` tells whether what is stored is what this write stores. Raises ``Unavailable`` if no attempt took
    effect, ``OutcomeUnknown`` if that is not known.
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
    """Wait before the next attempt; after the last raise ``OutcomeUnknown`` if one of them may have taken effect."""
    if attempt + 1 < ATTEMPTS_MAX:
        await asyncio.sleep(_FIRST_PAUSE_S * 3**attempt)
    elif doubtful:
        raise OutcomeUnknown(failure.message) from failure
    else:
        raise Unavailable(failure.message) from failure
