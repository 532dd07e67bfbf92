"""The decisions of nemeses and clients in a run, by name, so that a failing run can be repeated with fewer of them.

Code that is about to take an optional step calls :meth:`Schedule.allows`. Names of decisions do not depend on one another
(``brokers#7`` is the seventh step of the nemesis ``brokers``), and each draws its randomness by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Decision:
    """A decision that was carried out; ``lines`` are the lines that it added to the trace."""

    name: str
    at_s: float
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = "; ".join(line.split(None, 1)[-1] for line in self.lines)
        return f"{self.at_s:9.4f} {self.name}" + (f": {what}" if what else "")


@dataclass(slots=True)
class Schedule:
    """The decisions of a run. If ``kept`` is set, only decisions named in it are carried out."""

    kept: frozenset[str] | None = None
    decisions: dict[str, Decision] = field(default_factory=dict)

    def allows(self, name: str, now: float) -> bool:
        """Return whether to carry out the decision, and record it. Later calls return the same."""
        if self.kept is not None and name not in self.kept:
            return False
        self.decisions.setdefault(name, Decision(name, now))
        return True

    def carry_out(self, name: str, now: float, trace: list[str], act: Callable[[], None]) -> None:
        """Call ``act`` if that is allowed. Record it as a decision with its trace lines, unless it added none."""
        if self.kept is not None and name not in self.kept:
            return
        before = len(trace)
        act()
        if len(trace) > before:
            self.decisions[name] = Decision(name, now, tuple(trace[before:]))
