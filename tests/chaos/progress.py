"""Progress of the run: counts, partitions that accept records, and for how long they did not."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from chaos.history import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A fault of this kind began, ended, and all partitions accepted records again (in nanoseconds of the run)."""

    kind: str
    began_ns: int
    ended_ns: int
    recovered_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailability:
    """For one kind of fault, in seconds: the longest times in which one partition, or all of them, confirmed no record."""

    kind: str
    times: int
    partition_gap_p50_s: float
    partition_gap_max_s: float
    cluster_gap_max_s: float
    recovery_p50_s: float
    recovery_max_s: float


class Progress:
    """Listens to the history; other threads query it."""

    def __init__(self, keys: Iterable[int]) -> None:
        self.counts: Counter[str] = Counter()
        self._confirmed = {key: array("q") for key in keys}
        self._newest = dict.fromkeys(self._confirmed, -1)
        """By key, the time at which the newest confirmed send was invoked."""
        self._invoked: dict[int, int] = {}
        self._lock = threading.Lock()

    def __call__(self, operation: Operation) -> None:
        """Process an operation."""
        if operation.f == "send" and operation.key is not None:
            with self._lock:
                self._send(operation, operation.key)
        elif operation.f == "poll" and operation.polled:
            self.counts["polled"] += sum(map(len, operation.polled.values()))

    def _send(self, operation: Operation, key: int) -> None:
        self.counts[operation.type] += 1
        if operation.type == "invoke":
            self._invoked[operation.process] = operation.time_ns
            return
        invoked = self._invoked.pop(operation.process)
        if operation.type == "ok":
            self._confirmed[key].append(operation.time_ns)
            self._newest[key] = max(self._newest[key], invoked)

    def silent_since(self, moment_ns: int) -> list[int]:
        """Return the keys without a confirmed record that was sent after ``moment_ns``."""
        with self._lock:
            return [key for key, newest in self._newest.items() if newest < moment_ns]

    def longest_gaps_s(self, windows: Sequence[Window]) -> list[float]:
        """Return for each window the longest time in which one of the partitions confirmed nothing."""
        with self._lock:
            each = [list(times) for times in self._confirmed.values()]
        return [max(longest_gap_s(times, window) for times in each) for window in windows]

    def unavailability(self, windows: Sequence[Window]) -> list[Unavailability]:
        """Return one row for each kind of fault, sorted by kind."""
        with self._lock:
            everything = sorted(time for times in self._confirmed.values() for time in times)
        rows = []
        for kind in sorted({window.kind for window in windows}):
            found = [window for window in windows if window.kind == kind]
            gaps = self.longest_gaps_s(found)
            recoveries = [(window.recovered_ns - window.ended_ns) / 1e9 for window in found]
            rows.append(
                Unavailability(
                    kind=kind,
                    times=len(found),
                    partition_gap_p50_s=median(gaps),
                    partition_gap_max_s=max(gaps),
                    cluster_gap_max_s=max(longest_gap_s(everything, window) for window in found),
                    recovery_p50_s=median(recoveries),
                    recovery_max_s=max(recoveries),
                )
            )
        return rows


def longest_gap_s(times_ns: Sequence[int], window: Window) -> float:
    """Return the longest time between two confirmations that overlaps the window."""
    gaps = [
        later - earlier for earlier, later in pairwise(times_ns) if later > window.began_ns and earlier < window.recovered_ns
    ]
    return max(gaps, default=window.recovered_ns - window.began_ns) / 1e9
