"""Writes ``docs/lab/benchmarks.md`` from a recorded run: goals, tables and pictures between two markers. The rest is by hand.

``python -m benchmarks.page RUN`` writes it again without measuring.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import coverage, recorded, summary
from benchmarks.carried import is_queue, overload_lines, overloads
from benchmarks.charts import Bar, ratio_chart
from benchmarks.coverage import goals_without_verdict
from benchmarks.grid import Grid, changes_of, grid_lines, grid_of, grid_picture
from benchmarks.journal import Run
from benchmarks.labels import label_of
from benchmarks.main_figures import write_main_figures
from benchmarks.matrix import Goal, Matrix, Workload, read_matrix
from benchmarks.tables import SHOWN, all_tables, main_table, times
from stratalog_loadgen.results.report import figure, flat

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PAGE = Path(__file__).parents[1] / "docs" / "lab" / "benchmarks.md"
PICTURES = PAGE.with_name("benchmarks")

_CELLS_MAX = 8
_PICTURES: dict[str, tuple[str, str | tuple[str, ...], str]] = {
    "throughput": ("Throughput, ours to Kafka's (right is better)", "produce", "records_per_s"),
    "latency": ("p99 at a fixed rate, ours to Kafka's (left is better)", "latency", "latency_p99_ms"),
    "reading": ("Reading, ours to Kafka's (right is better)", ("tail", "catch-up"), "records_per_s"),
    "memory": ("Memory of the whole cluster, ours to Kafka's (left is better)", "produce", "memory_bytes"),
    "failover": ("Median gap at a failover, ours to Kafka's (left is better)", "failover", "gap_median_s"),
}


def write_pages(name: str, run: Run, matrix: Matrix) -> None:
    """The page of all cells in the lab, and the main figures for users."""
    write_page(name, run, matrix)
    write_main_figures(name, run, against_of(run))


def write_page(name: str, run: Run, matrix: Matrix, *, page: Path = PAGE, pictures: Path = PICTURES) -> None:
    """Replace the text between the markers of ``page``, and the pictures."""
    against = against_of(run)
    document = page.read_text() if page.exists() else f"# Benchmarks\n\n{BEGIN}\n{END}\n"
    before, rest = document.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    drawn = _draw(run, matrix, against, pictures)
    goals = [*_goals(run, matrix, against), *_limits(run, matrix, against)]
    body = [*_what_ran(name, run, matrix), *goals, *drawn, *_tables(run, matrix, against, pictures)]
    lines = [*contents_of(body), *body]
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


def contents_of(lines: Sequence[str]) -> list[str]:
    """Links to the headings among ``lines``, in their order."""
    titles = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    return [*(f"- [{title}](#{_anchor(title)})" for title in titles), ""] if titles else []


def _anchor(title: str) -> str:
    """As GitHub makes them: small letters, digits, spaces as hyphens; all else goes."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def against_of(run: Run) -> str:
    """The system that ours is compared with: the first other one."""
    return next((name for name in run.systems if name != summary.OURS), "kafka")


def _what_ran(name: str, run: Run, matrix: Matrix) -> list[str]:
    moments = sorted(row.at for row in run.rows)
    clients = sorted({row.client for row in run.rows if row.client})
    profiles = list(dict.fromkeys(row.profile or run.profile for row in run.rows))
    commits = dict.fromkeys((row.commit or run.commit)[:10] for row in run.rows)
    lines = [
        f"Run `{name}` (profiles: {', '.join(profiles)}; commits: {', '.join(commits)}) from {moments[0]} to {moments[-1]}, "
        f"on {run.machine['cores']} cores ({run.machine['system']}, Python {run.machine['python']}), which servers and clients "
        "share. The systems ran in turns. Figures are medians of the rounds.",
        "",
        *(f"- **{system}**: {text}" for system, text in run.systems.items()),
        f"- Clients: {'; '.join(clients)}. Half of each payload is random bytes, the rest zeros.",
        *(f"- {_how_long(each, matrix)}" for each in profiles if each in matrix.profiles),
        "",
    ]
    missing = list(coverage.not_measured(run, matrix))
    return [*lines, *(["Not measured:", "", *(f"- {line}" for line in missing), ""] if missing else [])]


def _how_long(profile: str, matrix: Matrix) -> str:
    shape = matrix.profiles[profile]
    return (
        f"Profile {profile} measures {shape.duration_s:g} s of each cell, after a warm-up of {shape.warmup_s:g} s plus "
        f"{shape.warmup_per_partition_s * 1000:g} ms per partition, on clusters warmed up for {shape.warm_cluster_s:g} s. "
        "A load of a fixed size is measured until it is complete."
    )


def _goals(run: Run, matrix: Matrix, against: str) -> list[str]:
    found = list(summary.verdicts(run, matrix.goals, against))
    if not found:
        return []
    missing = list(goals_without_verdict(run, matrix, against))
    rows = []
    for goal in matrix.goals:
        rows += _goal_rows([each for each in found if each.goal == goal])
        rows += [f"| {goal.title} | {cell} | {_bound(goal)} | – | not measured |" for each, cell in missing if each == goal]
    head = ["### Goals", "", f"| goal | cell | bound | ours to {against} | |", "| --- | --- | --- | --- | --- |"]
    return [*head, *rows, ""]


def _goal_rows(verdicts: Sequence[summary.Verdict]) -> list[str]:
    """One per cell; of a goal about many cells one in all, and those that missed it."""
    shown = list(verdicts)
    rows = []
    if len(verdicts) > _CELLS_MAX:
        shown = [verdict for verdict in verdicts if not verdict.reached]
        goal, reached = verdicts[0].goal, len(verdicts) - len(shown)
        ratios = sorted(verdict.ratio for verdict in verdicts)
        rows = [
            f"| {goal.title} | {len(verdicts)} cells | {_bound(goal)} | {times(ratios[0])} … {times(ratios[-1])}, "
            f"median {statistics.median(ratios):.2f} | reached in {reached} |"
        ]
    return rows + [f"| {each.goal.title} | {each.cell} | {_bound(each.goal)} | {_judged(each)} |" for each in shown]


def _judged(verdict: summary.Verdict) -> str:
    """Ratio and verdict."""
    if not verdict.carried:
        return "† | **not reached**: the load was not carried"
    return f"{times(verdict.ratio)} | {'reached' if verdict.reached else '**not reached**'}"


def _limits(run: Run, matrix: Matrix, against: str) -> list[str]:
    """For every goal that was missed: how the CPU time was used, and the most that our servers could still gain."""
    missed = [verdict for verdict in summary.verdicts(run, matrix.goals, against) if not verdict.reached]
    limits = [(verdict, found) for verdict in missed if (found := summary.limit(run, verdict, against))]
    lines = ["### Limits of the goals that were not reached", "", *_LIMITS_READ, ""] if missed else []
    without = [(verdict, None) for verdict in missed if all(verdict is not other for other, _ in limits)]
    for verdict, found in [*limits, *without]:
        title = f"{verdict.goal.title}, {verdict.cell} ({_bound(verdict.goal)}, {_measured(verdict)})"
        told = _limit_lines(run, found, against) if found else _without_limit_lines(run, verdict, against)
        lines += ["<details>", f"<summary>{title}</summary>", "", *told, "", "</details>", ""]
    return lines


def _without_limit_lines(run: Run, verdict: summary.Verdict, against: str) -> list[str]:
    """Of a goal that is not about a rate, or where CPU was not measured."""
    shares = _shares_lines(run, verdict.cell, against)
    return [*shares, *_overload_lines(run, verdict, against), *_floor_lines(run, verdict, against)]


def _measured(verdict: summary.Verdict) -> str:
    return f"measured {times(verdict.ratio)}" if verdict.carried else "the load was not carried"


_LIMITS_READ = (
    "CPU time is that of the measured window. *Other* is CPU time of no process under test: kernel threads, which also write",
    "to disk, the measuring itself, and neighbours. The *ceiling* is the rate at which the clients alone would use all cores:",
    "no server can reach a goal above it on this machine. Where cores were idle, CPU does not limit the rate: the time from a",
    "batch to its acknowledgement does, with the number of batches that the client keeps in flight.",
)


def _limit_lines(run: Run, found: summary.Limit, against: str) -> list[str]:
    roles = ", ".join(f"{role} {figure(value)}" for role, value in found.per_gb.items())
    allowed = found.servers_s_per_gb_allowed
    servers_s_per_gb = sum(found.per_gb.values())
    verdict = (
        f"To reach the goal, all our servers together may use {figure(allowed)} s/GB, and no core may ever be idle"
        if allowed > 0
        else "No server can reach the goal with these clients on these cores, however little CPU it uses"
    )
    return [
        *_shares_lines(run, found.cell, against),
        f"- CPU per GB, ours: clients {figure(found.clients_s_per_gb)} s; {roles}; all servers together "
        f"{figure(servers_s_per_gb)} s.",
        *_way_lines(run, found.cell, against),
        f"- Ceiling, if our servers used no CPU: {figure(found.ceiling_mb_per_s)} MB/s, {found.ceiling_ratio:.2f} times "
        f"{against}'s measured rate. {verdict}.",
    ]


def _way_lines(run: Run, cell: str, against: str) -> list[str]:
    ways = {system: summary.median(run, cell, system, "latency_p50_ms") for system in (summary.OURS, against)}
    told = ", ".join(f"{system} {figure(way)} ms" for system, way in ways.items() if way is not None)
    return [f"- Median time from passing a record to the client to its acknowledgement: {told}."] if told else []


def _shares_lines(run: Run, cell: str, against: str) -> list[str]:
    """Of the machine's cores, by role, for both systems."""
    lines = []
    for system in (summary.OURS, against):
        shares = summary.by_role(run, cell, system, summary.SHARE)
        if shares:
            parts = ", ".join(f"{role} {share:.0%}" for role, share in shares.items())
            lines.append(f"- Share of all cores, {system}: {parts}.")
    return lines or ["- CPU time was not measured."]


def _overload_lines(run: Run, verdict: summary.Verdict, against: str) -> list[str]:
    """How much of the rate was carried."""
    if verdict.carried:
        return []
    found = overloads(run, verdict.cell, against)
    return [f"- {each.system} carried {figure(each.carried)} of {figure(each.wanted)} records/s: {each.why}." for each in found]


def _floor_lines(run: Run, verdict: summary.Verdict, against: str) -> list[str]:
    """The lowest latency that any server could have, where the client holds records back."""
    held_ms, theirs = summary.held_ms(run, verdict.cell), summary.median(run, verdict.cell, against, "latency_p99_ms")
    if verdict.goal.quantity != "latency_p99_ms" or not verdict.carried or not held_ms or not theirs:
        return []
    return [
        f"- The client holds a record back for up to {figure(held_ms)} ms, until its batch is full or its linger ends. Even a "
        f"server that took no time would have {held_ms / theirs:.2f} of {against}'s p99."
    ]


def _bound(goal: Goal) -> str:
    return f"≥ {goal.at_least:g}" if goal.at_least is not None else f"≤ {goal.at_most:g}"


def _draw(run: Run, matrix: Matrix, against: str, pictures: Path) -> list[str]:
    lines = []
    for name, (title, prefix, quantity) in _PICTURES.items():
        bars = list(_bars(run, matrix, against, prefix, quantity))
        if bars:
            pictures.mkdir(parents=True, exist_ok=True)
            (pictures / f"{name}.svg").write_text(ratio_chart(title, bars))
            lines += [f"![{title}]({pictures.name}/{name}.svg)", ""]
    return lines


def _bars(run: Run, matrix: Matrix, against: str, prefix: str | tuple[str, ...], quantity: str) -> Iterator[Bar]:
    grids = [(workload, grid_of(run, workload)) for workload in matrix.workloads if workload.products]
    cells = summary.cell_names(run)
    for workload, grid in grids:
        cells = _outside(grid, cells, workload)
    for cell in cells:
        found = summary.ratio(run, cell, quantity, against) if cell.startswith(prefix) else None
        if found and not is_queue(run, cell, quantity, against):
            goals = [goal for goal in matrix.goals if goal.covers(cell) and goal.quantity == quantity and not goal.over]
            goal = next(((each.at_least or each.at_most) for each in goals), None)
            yield Bar(label=label_of(cell), ratio=found, more_is_better=bool(SHOWN[quantity][1]), goal=goal)


def _tables(run: Run, matrix: Matrix, against: str, pictures: Path) -> Iterator[str]:
    for workload in matrix.workloads:
        cells = [name for name in summary.cell_names(run) if changes_of(name, workload) is not None]
        grid = grid_of(run, workload)
        if not cells:
            continue
        base = ", ".join(f"{name} {value}" for name, value in flat(workload.base))
        yield from (f"### {workload.title}", "", f"Settings, unless the name of a cell says otherwise: {base}.", "")
        if workload.name in run.remarks:
            yield from (f"**{run.remarks[workload.name]}**", "")
        if grid:
            picture = f"{workload.name}-grid.svg".replace(" ", "-")
            pictures.mkdir(parents=True, exist_ok=True)
            (pictures / picture).write_text(grid_picture(run, grid, against))
            yield from grid_lines(run, grid, against, f"{pictures.name}/{picture}")
        near = _outside(grid, cells, workload)
        yield from (*main_table(run, near, workload.name, against), "")
        yield from overload_lines(run, near, against)
        yield from all_tables(run, near, workload.name, against)


def _outside(grid: Grid | None, cells: Sequence[str], workload: Workload) -> list[str]:
    """Without a grid's cells that differ from the base in more than one axis: those stand in the grid alone."""
    inside = set(grid.cells.values()) if grid else set()
    return [cell for cell in cells if cell not in inside or len(changes_of(cell, workload) or {}) < 2]


def main() -> None:
    """Page and pictures of a recorded run; without a name of the last one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    runs = recorded.read_runs()
    parser.add_argument(
        "run", nargs="?", choices=sorted(runs), help="Name of a file in benchmarks/recorded or benchmarks/results."
    )
    name = parser.parse_args().run or max(runs, default=None, key=lambda each: max(row.at for row in runs[each].rows))
    if name is None:
        parser.error("nothing was measured yet: `make bench`")
    write_pages(name, runs[name], read_matrix())


if __name__ == "__main__":
    main()
