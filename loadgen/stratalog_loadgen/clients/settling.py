"""How long a group took to settle, and again after members had left: of all members in one process."""

from __future__ import annotations

import time
from collections.abc import Callable

from stratalog_loadgen.processes.control import Control


class Settling:
    """``changed_at`` tells when the assignment of some member last changed, 0 if none has any."""

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
        """From the leaving to the last change behind it; 0 if nobody left."""
        return max(0.0, self._changed_at() - self._left_at) if self._left_at else 0.0

    def note_leaving(self) -> None:
        """Members leave now, of this process or another."""
        self.note_assignments()
        self._left_at = time.monotonic()

    def note_assignments(self) -> None:
        """Count changes until now as settling, unless members have left."""
        if not self._left_at:
            self.settled_s = max(0.0, self._changed_at() - self._control.began)
