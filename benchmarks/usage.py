"""Resources that the processes of each role and the machine used during a window, from continuous samples.

A thread reads the CPU time of every process a few times per second, so that whatever a load says it counted, from one moment of
the monotonic clock to another, has its exact share: between two samples the use is taken as even.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from benchmarks.systems import System, cpu_s_of

CLIENT = "client"
"""The role of load processes."""

_INTERVAL_S = 0.2
_SAMPLES_MAX = 200_000

Amounts = Mapping[str, float]


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds by role within a window; ``machine_s`` is what all cores had, ``idle_s`` the part of it that was not used."""

    by_role: dict[str, float]
    machine_s: float
    idle_s: float

    @property
    def other_s(self) -> float:
        """CPU time of kernel threads, of this process, and of other load on the machine."""
        return max(0.0, self.machine_s - self.idle_s - sum(self.by_role.values()))


class Roles:
    """CPU seconds of a system's processes by role, and of the load processes that this one has started."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._clients: dict[int, float] = {}

    def cpu_s(self) -> dict[str, float]:
        """So far; a load process that has ended keeps what it was last seen with."""
        servers = {pid for _, pid in self._system.pids()}
        for pid in _children() - servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._clients[pid] = cpu_s_of(psutil.Process(pid))
        return {**self._system.cpu_s(), CLIENT: sum(self._clients.values())}


def _children() -> set[int]:
    """The descendants of this process, without a scan of all processes of the machine."""
    listings = Path("/proc/self/task").glob("*/children")
    found: set[int] = set()
    for listing in listings:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found.update(map(int, listing.read_text().split()))
    return found


class Usage:
    """A context; ``read`` gives the CPU seconds so far of every role."""

    def __init__(self, read: Callable[[], Amounts]) -> None:
        self._read = read
        self._moments: list[float] = []
        self._samples: list[dict[str, float]] = []
        self._ended = threading.Event()
        self._sampling = threading.Lock()
        self._thread = threading.Thread(target=self._sample_until_ended, daemon=True)

    def __enter__(self) -> Usage:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def within(self, window: tuple[float, float]) -> Used | None:
        """``None`` if the window was not sampled from its beginning to its end."""
        self._sample()
        return used_within(self._moments, self._samples, window)

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(_INTERVAL_S) and len(self._moments) < _SAMPLES_MAX:
            self._sample()

    def _sample(self) -> None:
        with self._sampling:
            self._add()

    def _add(self) -> None:
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # Guests are in user and nice already.
        machine_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        sample = {**self._read(), _IDLE: idle_s, _MACHINE: machine_s}
        self._moments.append(time.monotonic())
        self._samples.append(sample)


_IDLE, _MACHINE = "(idle)", "(machine)"


def used_within(moments: list[float], samples: list[dict[str, float]], window: tuple[float, float]) -> Used | None:
    """Differences of what the samples say at the window's two ends, interpolated. Pure."""
    began, ended = window
    if not moments or began < moments[0] or ended > moments[-1] or ended <= began:
        return None
    before, after = (_at(moments, samples, moment) for moment in window)
    used = {name: max(0.0, amount - before.get(name, 0.0)) for name, amount in after.items()}
    return Used(idle_s=used.pop(_IDLE, 0.0), machine_s=used.pop(_MACHINE, 0.0), by_role=used)


def _at(moments: list[float], samples: list[dict[str, float]], moment: float) -> dict[str, float]:
    later = min(len(moments) - 1, max(1, bisect.bisect_left(moments, moment)))
    earlier = later - 1
    span = moments[later] - moments[earlier]
    share = (moment - moments[earlier]) / span if span > 0 else 1.0
    first, second = samples[earlier], samples[later]
    return {name: first.get(name, amount) + share * (amount - first.get(name, amount)) for name, amount in second.items()}
