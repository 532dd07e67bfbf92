"""What nemeses and clients decide to do in a run, by name, so that a failing run can be repeated with less of it.

Whoever is about to do something that the run could do without asks :meth:`Schedule.allows`. Decisions have names that do
not depend on one another (``brokers#7`` is the seventh step of the nemesis ``brokers``), and draw their randomness from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Decision:
    """One thing that was done; ``lines`` are what it wrote into the trace."""

    name: str
    at_s: float
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = "; ".join(line.split(None, 1)[-1] for line in self.lines)
        return f"{self.at_s:9.4f} {self.name}" + (f": {what}" if what else "")


@dataclass(slots=True)
class Schedule:
    """With ``kept``, only what it names is done."""

    kept: frozenset[str] | None = None
    decisions: dict[str, Decision] = field(default_factory=dict)

    def allows(self, name: str, now: float) -> bool:
        """Whether to do it. Asked again, the answer is the same."""
        if self.kept is not None and name not in self.kept:
            return False
        self.decisions.setdefault(name, Decision(name, now))
        return True

    def carry_out(self, name: str, now: float, trace: list[str], act: Callable[[], None]) -> None:
        """Do it, if that is allowed, and remember what it wrote into the trace. What does nothing is no decision."""
        if self.kept is not None and name not in self.kept:
            return
        before = len(trace)
        act()
        if len(trace) > before:
            self.decisions[name] = Decision(name, now, tuple(trace[before:]))
