"""Measures how busy the machine was: the time for which processes had to wait for a processor.

The kernel wakes a mostly idle process at once even on a busy machine, where one that has to work, as after its start, gets a
small share of the processors. So both are measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_INTERVAL_S: Final = 0.05
_COUNTED_S: Final = 0.5


def processor_waits_s(pids: Iterable[int]) -> dict[int, float]:
    """Return by process for how many seconds one of its threads was ready and waited for a processor: that of the busiest one.

    Processes that have ended are missing. It is 0 on kernels without ``CONFIG_SCHED_INFO``.
    """
    return {
        pid: max(waits) for pid in pids if (waits := [_thread_wait_s(path) for path in Path(f"/proc/{pid}/task").glob("*")])
    }


def _thread_wait_s(task: Path) -> float:
    with suppress(OSError, IndexError):  # The thread has ended; the kernel does not count.
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    return 0.0


def longest_wait_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the longest wait of a process between two results of ``processor_waits_s``; it may have started in between."""
    return max((wait_s - before.get(pid, 0.0) for pid, wait_s in after.items()), default=0.0)


class Stalls:
    """Sleeps repeatedly and adds up the time by which it wakes up late, in seconds."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.total_s = 0.0
        """The sum of waits that were longer than half a second."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="stalls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _measure(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(_INTERVAL_S):
            now = time.monotonic()
            late_s, before = now - before - _INTERVAL_S, now
            self.longest_s = max(self.longest_s, late_s)
            self.total_s += late_s if late_s > _COUNTED_S else 0.0
