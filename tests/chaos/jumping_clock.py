"""A wall clock that a file sets forwards and backwards; the monotonic clock is not affected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from stratalog_core.system import SystemClock

_LOOK_S: Final = 0.05


def set_clock(control: Path, offset_ms: int) -> None:
    """Move the wall clock of the process that watches ``control`` by ``offset_ms`` from the true time."""
    aside = control.with_suffix(".new")
    aside.write_text(str(offset_ms))
    os.replace(aside, control)


class JumpingClock(SystemClock):
    """The system's clock with an offset on wall time. ``control`` is read at most every 50 ms."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self._offset_ms = 0
        self._looked_at_s = float("-inf")

    def wall_ms(self) -> int:
        now_s = self.monotonic()
        if now_s - self._looked_at_s > _LOOK_S:
            self._looked_at_s = now_s
            try:
                self._offset_ms = int(self._control.read_text())
            except FileNotFoundError:
                self._offset_ms = 0
        return super().wall_ms() + self._offset_ms
