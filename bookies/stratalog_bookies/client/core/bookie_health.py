"""Which bookies to avoid for a while, judged by what this client has seen; the registry is judged separately. No I/O."""

from __future__ import annotations


class BookieHealth:
    """A failed bookie is avoided for a time that doubles with each further failure; an answer clears it."""

    def __init__(self, avoid_s: float, avoid_s_max: float) -> None:
        self._avoid_s = avoid_s
        self._avoid_s_max = avoid_s_max
        self._avoided_until: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def failed(self, bookie: str, now: float) -> None:
        failures = self._failures.get(bookie, 0) + 1
        self._failures[bookie] = failures
        self._avoided_until[bookie] = now + min(self._avoid_s * 2.0 ** min(failures - 1, 32), self._avoid_s_max)

    def answered(self, bookie: str) -> None:
        if bookie in self._failures:
            del self._failures[bookie], self._avoided_until[bookie]

    def is_avoided(self, bookie: str, now: float) -> bool:
        return self._avoided_until.get(bookie, now) > now

    def avoided(self, now: float) -> set[str]:
        return {bookie for bookie, until in self._avoided_until.items() if until > now}
