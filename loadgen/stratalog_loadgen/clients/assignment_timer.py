"""Measures how long assignments take: from the start to the last change, and again after members left."""

from __future__ import annotations

import time
from collections.abc import Callable

from stratalog_loadgen.processes.control import Control


class AssignmentTimer:
    """Covers the members of one process. ``changed_at`` returns the time of the last change of an assignment, 0 if none."""

    def __init__(self, control: Control, changed_at: Callable[[], float]) -> None:
        self._control = control
        self._changed_at = changed_at
        self._left_at = 0.0
        self.settled_s = 0.0

    @property
    def has_left(self) -> bool:
        """Whether members have left, of this process or another."""
        return bool(self._left_at)

    @property
    def is_rebalanced(self) -> bool:
        return bool(self._left_at) and self._changed_at() > self._left_at

    @property
    def rebalance_s(self) -> float:
        """From the time when members left to the last change after it; 0 if none left."""
        return max(0.0, self._changed_at() - self._left_at) if self._left_at else 0.0

    def note_leaving(self) -> None:
        """Members leave now, in this process or in another."""
        self.note_assignments()
        self._left_at = time.monotonic()

    def note_assignments(self) -> None:
        """Count changes until now as part of the first assignment, unless members have left."""
        if not self._left_at:
            self.settled_s = max(0.0, self._changed_at() - self._control.began)
