"""A background loop that fails is logged and run again; one that returns, is cancelled or is discarded is not."""

from __future__ import annotations

import asyncio

import pytest

from stratalog_core.restarting import restarting


async def test_a_loop_that_fails_is_logged_and_run_again(caplog: pytest.LogCaptureFixture) -> None:
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise ValueError(f"failure {runs}")

    await restarting(run, "the search for offsets", pause_s=0)
    assert runs == 3
    logged = [(record.levelname, record.getMessage(), str(record.exc_info)) for record in caplog.records]
    assert [level for level, _, _ in logged] == ["ERROR", "ERROR"]
    assert all("the search for offsets ended unexpectedly" in message for _, message, _ in logged)
    assert "failure 1" in logged[0][2]
    assert "failure 2" in logged[1][2]


async def test_a_cancelled_loop_ends() -> None:
    began = asyncio.Event()

    async def run() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(restarting(run, "a loop"))
    await began.wait()
    task.cancel()
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)


def test_a_loop_that_is_discarded_ends_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Python closes the coroutine of a discarded task. A clean-up that awaits turns that into a ``RuntimeError``."""

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    coroutine = restarting(run, "a loop")
    task = loop.create_task(coroutine)
    loop.call_soon(loop.call_soon, loop.stop)
    loop.run_forever()
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        coroutine.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    assert caplog.records == []
