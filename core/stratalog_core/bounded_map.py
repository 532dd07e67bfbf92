"""Runs one call for each of many items, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def bounded_map(call: Callable[[Item], Awaitable[Result]], items: Iterable[Item], at_once: int) -> list[Result]:
    """Return the results of ``call`` in the order of ``items``; at most ``at_once`` calls and tasks exist at a time.

    The first failure cancels the other calls and is raised.
    """
    numbered = enumerate(items)
    results: dict[int, Result] = {}

    async def work() -> None:
        for number, item in numbered:
            results[number] = await call(item)

    workers = [asyncio.ensure_future(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in range(len(results))]
