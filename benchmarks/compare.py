"""Stratalog and Apache Kafka in turns, in one run, on one machine: ``python -m benchmarks.compare``, or ``make bench``.

Machines are noisy: rounds alternate (A B A B), and what counts is the ratio of the medians. Each system serves one cell after
the other; a cell that breaks its cluster gets one of its own. Every figure is written down at once: the same call goes on with
an interrupted run, and measures again what failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import carried, journal, page, recorded, summary
from benchmarks.cells import carry_out, warm_up
from benchmarks.journal import Journal, Row, Run
from benchmarks.matrix import Cell, Matrix, Profile, cells_of, read_matrix
from benchmarks.progress import bar, left_s, limit_s
from benchmarks.systems import DESCRIPTIONS, System, started
from stratalog_core.errors import StratalogError, Unavailable
from stratalog_loadgen.results.report import figure

_ROOT = Path(__file__).parents[1]
_SHORT = ("records_per_s", "latency_p99_ms", "end_to_end_p99_ms", "gap_median_s", "memory_bytes", "failed")


class GivenUp(StratalogError):
    """A cell took far longer than expected. Unlike other failures, it is not retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call: what is measured of which systems, and where it is written down."""

    matrix: Matrix
    name: str
    profile: Profile
    cells: Sequence[Cell]
    systems: Sequence[str]
    rounds: int
    commit: str
    journal: Journal


def main() -> None:
    """Measure what is missing, write the journal, print the ratios; with ``--page`` write ``docs/lab/benchmarks.md``, too."""
    # SIGTERM unwinds the stack, too, so that no cluster is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Clusters and load processes inherit the limit: ten thousand connections need as many files at both ends.
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    arguments = _arguments()
    matrix = read_matrix()
    name = arguments.run or f"{time.strftime('%Y-%m-%d')}-{arguments.profile}"
    goes_on = (journal.DIRECTORY / f"{name}.json").exists()
    systems = ["stratalog", *arguments.against]
    notes = {system: DESCRIPTIONS[system] for system in systems}
    fresh = Run(profile=arguments.profile, machine=_machine(), commit=_commit(), systems=notes)
    task = Task(
        matrix=matrix,
        name=arguments.profile,
        profile=matrix.profiles[arguments.profile],
        cells=cells_of(matrix, arguments.profile, *arguments.cells),
        systems=systems,
        rounds=arguments.rounds or matrix.profiles[arguments.profile].rounds,
        commit=fresh.commit,
        journal=Journal(journal.DIRECTORY / f"{name}.json", fresh),
    )
    for pattern in arguments.cells:
        if not cells_of(matrix, arguments.profile, pattern):
            raise SystemExit(f"no cell of profile {arguments.profile} is called {pattern!r}: --list names them")
    if arguments.list:
        print("\n".join(f"{cell.name:60} {cell.title}" for cell in task.cells))
        return
    print(f"run {name}: {len(task.cells)} cells, {task.rounds} rounds of {', '.join(systems)}\n{_progress(task)}", flush=True)
    _carry_out(task)
    _print_ratios(task.journal.run)
    if writes_page(arguments.profile, arguments.cells, goes_on=goes_on, wanted=not arguments.no_page):
        page.write_pages(name, task.journal.run, matrix)
        recorded.write(name, task.journal.run)
        print(f"written: {page.PAGE}")
    else:
        print(f"{page.PAGE.name} is left as it is; `python -m benchmarks.page {name}` writes it from this run")


def writes_page(profile: str, cells: Sequence[str], *, goes_on: bool, wanted: bool) -> bool:
    """A few cells replace nothing, unless they go into the file of a run that has more; figures of a smoke run never do."""
    return wanted and profile != "smoke" and (goes_on or not set(cells) - {"*"})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--profile", default="quick", choices=sorted(read_matrix().profiles), help="Which cells, how long.")
    parser.add_argument("--cells", nargs="+", default=[], help="Shell patterns of cell names, in the order to measure them.")
    parser.add_argument(
        "--run",
        help="Name of the file in benchmarks/results (default: date and profile); one that is there goes on.",
    )
    parser.add_argument("--rounds", type=int, help="Instead of the profile's.")
    parser.add_argument(
        "--against", nargs="*", default=["kafka"], choices=[each for each in DESCRIPTIONS if each != "stratalog"]
    )
    parser.add_argument("--no-page", action="store_true", help="Leave docs/lab/benchmarks.md as it is.")
    parser.add_argument("--list", action="store_true", help="Name the cells and stop.")
    return parser.parse_args()


def _carry_out(task: Task) -> None:
    """Round by round and block by block: within a block, the systems in turn."""
    for number in range(1, task.rounds + 1):
        for block in blocks(task.cells, task.profile.cells_per_cluster):
            for system in task.systems:
                _block(task, number, system, [cell for cell in block if not task.journal.has(cell.name, system, number)])


def blocks(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    """Cells that one cluster serves, ``size`` at most (0: any number); those that need a cluster of their own are alone."""
    shared = [cell for cell in cells if not cell.fresh]
    width = size or max(1, len(shared))
    parts = [shared[first : first + width] for first in range(0, len(shared), width)]
    return [*parts, *([cell] for cell in cells if cell.fresh)]


def _block(task: Task, number: int, system: str, cells: Sequence[Cell]) -> None:
    """On one cluster, or after a cell that failed on a new one, lest the others suffer from what it left."""
    left = list(cells)
    while left:
        try:
            left = _on_one_cluster(task, number, system, left)
        except Exception:  # outermost: what this cluster did not get to is measured by the same call again
            traceback.print_exc()
            return


def _on_one_cluster(task: Task, number: int, name: str, cells: Sequence[Cell]) -> list[Cell]:
    """Cells that did not run because an earlier one failed."""
    directories = tempfile.TemporaryDirectory(prefix=f"bench-{name}-", ignore_cleanup_errors=True)
    with directories as directory, started(name, Path(directory)) as system:
        warm_up(system, task.matrix.warm_up, task.profile.warm_cluster_s)
        for position, cell in enumerate(cells, 1):
            wait_for_quiet(system)
            wait_for_room(Path(directory))
            row = _measured(task, number, system, cell)
            task.journal.add(row)
            print(f"round {number}, {name}, {cell.name}: {_short(row)}\n{_progress(task)}", flush=True)
            if row.failure:
                return list(cells[position:])
    return []


def wait_for_quiet(system: System, *, share_max: float = 0.1, timeout_s: float = 20.0) -> None:
    """Wait until the servers have finished the previous cell's work, such as deleting topics and compiling code.

    They then use less than ``share_max`` of a core. After ``timeout_s`` the next cell is measured anyway.
    """
    deadline = time.monotonic() + timeout_s
    before = sum(system.cpu_s().values())
    while time.monotonic() < deadline:
        time.sleep(1)
        after = sum(system.cpu_s().values())
        if after - before < share_max:
            return
        before = after


def wait_for_room(directory: Path, *, free_bytes_min: int = 4_000_000_000, timeout_s: float = 120.0) -> None:
    """Wait until the data of earlier cells is deleted. Raises ``Unavailable`` that names the remedy."""
    deadline = time.monotonic() + timeout_s
    while (free := shutil.disk_usage(directory).free) < free_bytes_min:
        if time.monotonic() >= deadline:
            raise Unavailable(f"{free:,} bytes are free, a cell may need {free_bytes_min:,}: make room, or set TMPDIR")
        time.sleep(2)


def _progress(task: Task) -> str:
    """How much is done of this call's cells, and how long the rest may take."""
    rounds = range(1, task.rounds + 1)
    wanted = [(cell, system, number) for number in rounds for cell in task.cells for system in task.systems]
    left = [each for each in wanted if not task.journal.has(each[0].name, each[1], each[2])]
    clusters = sum(
        any(not task.journal.has(cell.name, system, number) for cell in block)
        for number in rounds
        for block in blocks(task.cells, task.profile.cells_per_cluster)
        for system in task.systems
    )
    seconds = left_s(task.journal.run, task.profile, task.cells, [(cell, system) for cell, system, _ in left], clusters)
    return f"{bar(len(wanted) - len(left), len(wanted), seconds)} ({time.strftime('%H:%M:%S')})"


@contextmanager
def gives_up_after(seconds: float) -> Iterator[None]:
    """Raise ``GivenUp`` in the main thread after ``seconds``, wherever it hangs; context managers clean up."""

    def give_up(*_: object) -> None:
        raise GivenUp(f"given up after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _measured(task: Task, number: int, system: System, cell: Cell) -> Row:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    row = Row(
        cell=cell.name,
        system=system.name,
        round=number,
        at=at,
        measured={},
        settings=cell.settings,
        profile=task.name,
        commit=task.commit,
    )
    began = time.monotonic()
    try:
        with gives_up_after(limit_s(cell, task.profile)):
            found = carry_out(cell, system, task.profile)
    except Exception as failure:  # outermost: a cell that fails is written down, and the others go on
        traceback.print_exc()
        return msgspec.structs.replace(row, failure=f"{type(failure).__name__}: {failure}"[:300])
    if found is None:
        return row
    took_s = round(time.monotonic() - began, 1)
    return msgspec.structs.replace(row, measured=found.measured, settings=found.settings, client=found.client, took_s=took_s)


def _short(row: Row) -> str:
    if row.failure or not row.measured:
        return row.failure or "no such thing in this system"
    return ", ".join(f"{name} {figure(row.measured[name])}" for name in _SHORT if row.measured.get(name) is not None)


def _print_ratios(run: Run) -> None:
    against = page.against_of(run)
    for cell in summary.cell_names(run):
        for quantity in _SHORT:
            found = summary.ratio(run, cell, quantity, against)
            if found is not None:
                ours, theirs = (summary.median(run, cell, system, quantity) for system in (summary.OURS, against))
                late = carried.is_queue(run, cell, quantity, against)
                told = "the load was not carried" if late else f"{found:.2f}"
                print(f"{cell}: {quantity} {figure(ours)} / {figure(theirs)} = {told}")
    for verdict in summary.verdicts(run, read_matrix().goals, against):
        print(
            f"goal {'reached' if verdict.reached else 'NOT reached'}: {verdict.goal.title} [{verdict.cell}] {verdict.ratio:.2f}"
        )


def _machine() -> dict[str, object]:
    return {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # All clusters have ended by now, and what was measured is written down.
        sys.exit("interrupted: the same call with the same RUN goes on")
