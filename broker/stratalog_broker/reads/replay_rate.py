"""How fast a broker sends history while producers wait for acknowledgements. Pure.

A replay takes as much of a machine as it gets. On few cores, or behind a full link, producers then wait several times as long
as usual. So the broker compares the mean time of Produce requests with the usual one. When it is much longer, history is sent
at a share of the rate that it had; once it is not, the rate rises again within one and a half minutes.

The usual time is that of requests while no history is sent, or while it is sent as slowly as is allowed: what is slow then has
another cause. If it is not known, history is held for a moment to learn it.
"""

from __future__ import annotations

from typing import Final

SLOW: Final = 1.5
"""Acknowledgements are slow if they take more than this many times the usual time and ``SLACK_S``."""
SLACK_S: Final = 0.001
RISE_S: Final = 120.0
"""Time in which a held rate would rise from nothing to the full one. Where the machine is too small for both, acknowledgements
are slow for a quarter of a second each time that it has risen too far: less than a hundredth of the time."""
USUAL_S: Final = 30.0
"""Time constant of the moving average of the usual time."""
LEAST: Final = 1_000_000
"""Bytes per second. No lower limit is set: history that is sent so slowly is not what delays producers."""
KNOWN_S: Final = 1.0
"""Time for which a rate, or the usual time, is measured before it counts: a replay begins with a burst from memory."""


class ReplayRate:
    """``limit``: bytes per second; 0: none. ``share`` of the full rate is never taken away."""

    def __init__(self, share: float) -> None:
        self.limit = 0.0
        self._share = share
        self._full = 0.0
        self._usual_s = 0.0
        """0: not known."""
        self._since_s = 0.0
        """For how long history has been sent, or held."""
        self._pause_s = 0.0
        """For how long none has been sent."""

    def update(self, elapsed_s: float, acknowledged_s: float | None, sent: int) -> None:
        """Adapt the limit to the last ``elapsed_s`` seconds.

        ``acknowledged_s``: the mean time of their Produce requests, None without any; ``sent``: bytes of history.
        """
        self._since_s += elapsed_s
        if not self.limit:
            self._update_free(elapsed_s, acknowledged_s, sent)
        elif acknowledged_s is None:
            self._release()
        elif self._usual_s:
            self._update_held(elapsed_s, acknowledged_s)
        elif self._since_s >= KNOWN_S:
            self._usual_s = acknowledged_s
            self._release()

    def _update_free(self, elapsed_s: float, acknowledged_s: float | None, sent: int) -> None:
        self._pause_s = 0.0 if sent else self._pause_s + elapsed_s
        if self._pause_s >= KNOWN_S:
            self._full = self._since_s = 0.0
            if acknowledged_s is not None:
                self._learn(elapsed_s, acknowledged_s)
            return
        self._full += (sent / elapsed_s - self._full) * min(1.0, elapsed_s / KNOWN_S)
        held = self._full * self._share
        if acknowledged_s is not None and held > LEAST and self._since_s >= KNOWN_S and self._is_slow(acknowledged_s):
            self.limit, self._since_s = held, 0.0

    def _update_held(self, elapsed_s: float, acknowledged_s: float) -> None:
        is_slow = self._is_slow(acknowledged_s)
        if self.limit <= self._full * self._share:
            self._learn(elapsed_s, acknowledged_s)
        if is_slow:
            self.limit = self._full * self._share
        else:
            self.limit += self._full * elapsed_s / RISE_S
            if self.limit >= self._full:
                self._release()

    def _is_slow(self, acknowledged_s: float) -> bool:
        return not self._usual_s or acknowledged_s > self._usual_s * SLOW + SLACK_S

    def _learn(self, elapsed_s: float, acknowledged_s: float) -> None:
        weight = min(1.0, elapsed_s / USUAL_S) if self._usual_s else 1.0
        self._usual_s += (acknowledged_s - self._usual_s) * weight

    def _release(self) -> None:
        self.limit = self._since_s = 0.0
