"""Gives up on a disk that hangs while its bookie starts. Later, :class:`StallWatch` watches its requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from stratalog_bookies.config import LOOKS_MAX, BookieSettings
from stratalog_bookies.disk.core.stall import StallWatch
from stratalog_core.errors import StorageFailed
from stratalog_core.ports import Background, Files

PROBE_FILE: Final = "probe"
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


async def unless_disk_hangs(
    work: Awaitable[Result],
    files: Files,
    directory: str,
    settings: BookieSettings,
    background: Background,
    has_another: Callable[[], bool],
) -> Result:
    """Return the result of ``work`` on a disk. Raises its errors, and ``StorageFailed`` if the disk hangs meanwhile.

    ``has_another``: whether the bookie can start with another disk. While it cannot, this waits: a hang may end.

    Work may take long. So a small file is written again and again beside it: the disk hangs if that does not end within
    ``disk_stall_ms``. The work is not stopped then: nothing ends a call that hangs.
    """
    working = asyncio.ensure_future(work)
    look_s, watch, probes = settings.disk_stall_ms / 1000 / LOOKS_MAX, StallWatch(LOOKS_MAX), 0
    probing: asyncio.Future[None] | None = None
    is_logged = False
    while not (await asyncio.wait((working,), timeout=look_s))[0]:
        if probing is None or probing.done():
            probes += 1
            probing = asyncio.ensure_future(background.run(partial(_probe, files)))
        watch.observe((probes,))
        if watch.is_stalled:
            hangs = f"{directory}: the disk hangs: nothing was written in {settings.disk_stall_ms} ms"
            if has_another():
                working.add_done_callback(_drop_result)
                raise StorageFailed(hangs, read_only=False)
            if not is_logged:
                _log.warning("%s; the bookie waits for it: it has no other disk", hangs)
                is_logged = True
    return working.result()


def _probe(files: Files) -> None:
    with contextlib.suppress(OSError):  # A disk that answers with an error does not hang.
        files.write_atomic(PROBE_FILE, b"")


def _drop_result(work: asyncio.Future[Result]) -> None:
    if not work.cancelled():
        work.exception()
