"""The time limit of S3 requests."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest

from stratalog_tiering.store.s3_attempts import time_limit

LIMIT_S = 0.1


class Block:
    """The result of a read."""


async def test_what_takes_longer_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with time_limit(LIMIT_S):
            await asyncio.sleep(60)
    assert time.monotonic() - began >= LIMIT_S / 2


async def test_the_limit_counts_from_the_last_call() -> None:
    async with time_limit(LIMIT_S) as heard:
        for _ in range(10):
            await asyncio.sleep(LIMIT_S / 4)
            heard()


async def test_another_error_passes() -> None:
    with pytest.raises(KeyError):
        async with time_limit(LIMIT_S):
            raise KeyError


async def test_what_the_task_does_afterwards_is_not_limited() -> None:
    async with time_limit(LIMIT_S):
        await asyncio.sleep(0)
    await asyncio.sleep(3 * LIMIT_S)


async def test_a_finished_task_and_its_result_are_freed_without_the_garbage_collector() -> None:
    async def read() -> Block:
        async with time_limit(60):
            await asyncio.sleep(0)
        return Block()

    gc.collect()
    gc.disable()
    try:
        task = asyncio.ensure_future(read())
        block, ended = weakref.ref(await task), weakref.ref(task)
        del task
        await asyncio.sleep(0)
        assert block() is None
        assert ended() is None
    finally:
        gc.enable()
