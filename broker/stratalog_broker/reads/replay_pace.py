"""Sends history at the rate that ``replay_rate.py`` decides. See there why.

While there is a limit, fetches take turns: each one that would be answered with history alone waits until what was sent before
would have been sent at that rate, and then gets up to ``HELD_BYTES``. Nothing is read or kept for it meanwhile. One that also
gets newer records does not wait. All history that is sent counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from stratalog_broker.reads.replay_rate import ReplayRate
from stratalog_core.metrics.groups import Histogram
from stratalog_core.ports import Clock

LOOK_S: Final = 0.25
ENOUGH: Final = 8
"""Produce requests that a measurement needs; with fewer, it goes on, for up to ``MEASURE_MAX_S``."""
MEASURE_MAX_S: Final = 2.0
QUIET_S: Final = 5.0
"""Without history for so long, nothing is measured until the next response with some."""
WAIT_MAX_S: Final = 10.0
"""Clients give a request up after 30 s or more."""
HELD_BYTES: Final = 1024 * 1024
RESERVED_MAX_S: Final = 0.1
"""How long the next turn waits for what is sent in one, at most: a store that is away, or has nothing, sends nothing."""
Begin = Callable[[], None]


class ReplayPace:
    """One per broker. ``produced`` returns the durations of all Produce requests so far.

    ``percent`` of the rate of history is never taken away; 100: there is never a limit.
    """

    def __init__(self, clock: Clock, produced: Callable[[], Histogram], percent: int) -> None:
        self._clock = clock
        self._produced = produced
        self._rate = ReplayRate(percent / 100)
        self._is_on = percent < 100
        self._free_at_s = 0.0
        """When all that was sent would have been sent at the limit."""
        self._reserved: deque[float] = deque()
        """Seconds by which turns have moved ``_free_at_s`` in which nothing has been sent yet."""
        self._waiting: dict[Begin, float] = {}
        """Since when each fetch has been waiting, the first one first."""
        self._next_turn: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent = 0
        self._sent_at_s = self._since_s = clock.monotonic()
        self._count, self._seconds = 0, 0.0
        """Of Produce requests, when the measurement in progress began, as was ``_since_s``."""

    @property
    def limit(self) -> float:
        """Bytes per second to which history is held; 0: it is not."""
        return self._rate.limit

    def wait(self, begin: Begin) -> None:
        """Call ``begin`` when it is its turn, after ``WAIT_MAX_S`` at the latest; not before this returns."""
        self._waiting[begin] = self._clock.monotonic()
        if self._next_turn is None:
            self._grant_in(0)

    def leave(self, begin: Begin) -> None:
        """Stop waiting."""
        self._waiting.pop(begin, None)

    def _grant_in(self, delay_s: float) -> None:
        """Schedule the next turn, in place of any other: a ``begin`` that sends at once has scheduled one itself."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._next_turn = asyncio.get_running_loop().call_later(delay_s, self._grant)

    def _grant(self) -> None:
        now_s, self._next_turn = self._clock.monotonic(), None
        while self._waiting:
            begin, since_s = next(iter(self._waiting.items()))
            at_s = min(self._free_at_s, since_s + WAIT_MAX_S) if self._rate.limit else now_s
            if at_s > now_s:
                self._grant_in(at_s - now_s)
                return
            del self._waiting[begin]
            if self._rate.limit:
                self._reserved.append(min(HELD_BYTES / self._rate.limit, RESERVED_MAX_S))
                self._free_at_s = max(self._free_at_s, now_s) + self._reserved[-1]
            begin()

    def sent(self, size: int) -> None:
        """Count a response with ``size`` bytes of history."""
        if self._is_on:
            if self._timer is None:
                self._sent_at_s = self._clock.monotonic()
                self._look()
            self._sent += size
            if self._rate.limit:
                self._charge(size / self._rate.limit)

    def _charge(self, seconds: float) -> None:
        """Count what was sent: in the place of what the oldest open turn has reserved, if there is one."""
        begin_s = max(self._free_at_s, self._clock.monotonic())
        if self._reserved:
            begin_s = self._free_at_s - self._reserved.popleft()
        self._free_at_s = begin_s + seconds
        self._grant_again()

    def _grant_again(self) -> None:
        """The first fetch may have its turn earlier than scheduled."""
        if self._waiting:
            self._grant_in(0)

    def _look(self) -> None:
        """Look again soon, unless no history was sent for a while."""
        now_s, produced = self._clock.monotonic(), self._produced()
        count, elapsed_s = sum(produced.counts) - self._count, now_s - self._since_s
        if self._sent:
            self._sent_at_s = now_s
        if elapsed_s >= MEASURE_MAX_S or (count >= ENOUGH and elapsed_s > 0):
            acknowledged_s = (produced.sum - self._seconds) / count if count else None
            self._rate.update(elapsed_s, acknowledged_s, self._sent)
            if not self._rate.limit:
                self._free_at_s = 0.0
                self._reserved.clear()
                self._grant_again()
            self._sent, self._since_s = 0, now_s
            self._count, self._seconds = self._count + count, produced.sum
        is_quiet = now_s - self._sent_at_s >= QUIET_S
        self._timer = None if is_quiet else asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def close(self) -> None:
        for timer in (self._timer, self._next_turn):
            if timer is not None:
                timer.cancel()
