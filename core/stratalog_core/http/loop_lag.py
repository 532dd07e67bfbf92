"""Measures event loop lag: how late the loop runs a timer, and so how long a request waits because the loop is busy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from stratalog_core.metrics.groups import Histogram, MetricGroup, histogram

INTERVAL_S: Final = 0.25


@dataclass(slots=True, kw_only=True)
class EventLoopMetrics(MetricGroup):
    """Health of the event loop."""

    subsystem = "process"

    event_loop_lag_seconds: Histogram = histogram("seconds", "How late the event loop ran a timer, sampled every 0.25 s")


class LoopLag:
    """Samples the running loop until it is closed."""

    def __init__(self, metrics: EventLoopMetrics) -> None:
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._sample)

    def close(self) -> None:
        self._timer.cancel()

    def _sample(self) -> None:
        now = self._loop.time()
        self._metrics.event_loop_lag_seconds.observe(max(0.0, now - self._due))
        self._due = now + INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._sample)
