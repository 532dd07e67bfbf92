"""Notices that a disk hangs: that it completes nothing and reports no error. Pure.

Looks are counted, not seconds: a process that stands still for a minute looks once.
"""

from __future__ import annotations

from collections.abc import Sequence


class StallWatch:
    """Call ``observe`` at regular intervals. The disk counts as stalled when one wait has outlasted ``looks_max`` of them."""

    def __init__(self, looks_max: int) -> None:
        self._looks_max = looks_max
        self._waits: tuple[int | None, ...] = ()
        self._looks: list[int] = []

    @property
    def is_stalled(self) -> bool:
        return any(looks >= self._looks_max for looks in self._looks)

    def observe(self, waits: Sequence[int | None]) -> None:
        """Note for each kind of work the number of the oldest that is in progress; None: there is none."""
        if len(waits) != len(self._waits):
            self._waits, self._looks = (None,) * len(waits), [0] * len(waits)
        for kind, (before, wait) in enumerate(zip(self._waits, waits, strict=True)):
            self._looks[kind] = self._looks[kind] + 1 if wait is not None and wait == before else 0
        self._waits = tuple(waits)
