"""Whether a system carried a load at a fixed rate: if not, its latency is that of a queue that only grows. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.journal import OURS, Row, Run
from stratalog_loadgen.results.result import CARRIED_MIN, carried_share, produced_rate

_IDLE_MAX = 0.15
_WANTED = "wanted_records_per_s"


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of one system in which a load was not carried; medians of those rounds, rates in records/s."""

    system: str
    rounds: int
    rounds_in_all: int
    wanted: float
    carried: float
    idle_share: float | None

    @property
    def why(self) -> str:
        """The likely reason, from the CPU figures."""
        if self.idle_share is None:
            return "CPU time was not measured"
        if self.idle_share <= _IDLE_MAX:
            used = f"the cores were {1 - self.idle_share:.0%} busy"
            return f"{used}, so servers, clients and neighbours together were at the machine's limit"
        return f"the cores were {self.idle_share:.0%} idle, so CPU was not the limit: a stall left a backlog until the end"


def is_about_delay(quantity: str) -> bool:
    """Whether the quantity is meaningless under a load that is not carried."""
    return quantity.startswith(("latency_", "end_to_end_"))


def wanted(run: Run, cell: str, system: str) -> float | None:
    """Return the rate that producers were to send; ``None`` for loads at full speed."""
    rates = [float(row.settings[_WANTED]) for row in _rows(run, cell, system)]
    return statistics.median(rates) if rates else None


def overload(run: Run, cell: str, system: str) -> Overload | None:
    """Return the rounds in which the load was not carried; ``None`` if there are none."""
    rows = _rows(run, cell, system)
    late = [row for row in rows if (carried_share(row.settings, row.measured) or 0.0) < CARRIED_MIN]
    if not late:
        return None
    idle = [float(row.measured["machine_share_idle"]) for row in late if "machine_share_idle" in row.measured]
    return Overload(
        system=system,
        rounds=len(late),
        rounds_in_all=len(rows),
        wanted=statistics.median(float(row.settings[_WANTED]) for row in late),
        carried=statistics.median(produced_rate(row.measured) or 0.0 for row in late),
        idle_share=statistics.median(idle) if idle else None,
    )


def overloads(run: Run, cell: str, against: str) -> list[Overload]:
    """Return our system's, then the other's."""
    return [found for system in (OURS, against) if (found := overload(run, cell, system))]


def is_queue(run: Run, cell: str, quantity: str, against: str) -> bool:
    """Whether it is a latency under a load that one of the two did not carry: then their ratio is meaningless."""
    return is_about_delay(quantity) and bool(overloads(run, cell, against))


def overload_lines(run: Run, cells: Sequence[str], against: str) -> Iterator[str]:
    """Yield Markdown: which loads were not carried, by how much, and why."""
    told = [(cell, found) for cell in cells for found in overloads(run, cell, against)]
    if not told:
        return
    delays = any(is_about_delay(name) for row in run.rows if row.cell in cells for name in row.measured)
    yield from (_QUEUE if delays else _SLOWED, "")
    for cell, found in told:
        rounds = f"{found.rounds} of {found.rounds_in_all} rounds"
        rates = f"{found.carried:,.0f} of {found.wanted:,.0f} records/s"
        yield f"- {cell}, {found.system}, {rounds}: {rates}; {found.why}."
    yield ""


_QUEUE = (
    f"† This load was not carried: the system handled less than {CARRIED_MIN:.0%} of its rate. Records then queue for longer "
    "and longer until the run ends. Their delay depends on the length of the run and is not a latency, so there is no ratio, "
    "verdict or bar."
)
_SLOWED = f"Producers sent less than {CARRIED_MIN:.0%} of their rate while consumers read:"


def _rows(run: Run, cell: str, system: str) -> list[Row]:
    """Return the rounds that have both rates."""
    rows = [row for row in run.rows if row.cell == cell and row.system == system]
    return [row for row in rows if row.settings.get(_WANTED) and row.measured.get("records_per_s") is not None]
