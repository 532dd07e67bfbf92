"""Figures of a workload on the page: the main ones of every cell at a glance, everything else folded away. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks import carried, summary
from benchmarks.journal import Run
from stratalog_loadgen.results.report import figure

# Quantities of the page, with how to read their ratio; a run's journal in benchmarks/results has all the others.
SHOWN: dict[str, tuple[str, bool | None]] = {
    "records_per_s": ("records/s", True),
    "megabytes_per_s": ("MB/s", True),
    "produced_records_per_s": ("produced meanwhile, records/s", True),
    "latency_p50_ms": ("p50 to the acknowledgement, ms", False),
    "latency_p99_ms": ("p99, ms", False),
    "latency_p999_ms": ("p99.9, ms", False),
    "end_to_end_p50_ms": ("p50 to a consumer, ms", False),
    "end_to_end_p99_ms": ("p99 to a consumer, ms", False),
    "end_to_end_p999_ms": ("p99.9 to a consumer, ms", False),
    "behind_p99_ms": ("p99 of the load's own delay, ms", False),
    "settled_s": ("all partitions assigned, s", False),
    "rebalance_s": ("rebalance after members left, s", False),
    "gap_median_s": ("median gap of a partition, s", False),
    "gap_max_s": ("worst partition, s", False),
    "serves_again_s": ("serves again after, s", False),
    "connections": ("connections held", True),
    "opened_in_s": ("opened in, s", False),
    "request_p99_ms": ("p99 of a request meanwhile, ms", False),
    "memory_bytes_per_connection": ("memory per connection, bytes", False),
    "share_of_before": ("share of the throughput before", True),
    "memory_bytes": ("memory of all processes, MB (PSS)", False),
    "server_cpu_s_per_gb": ("CPU of all servers, s/GB", False),
    "clients_cpu_s_per_gb": ("CPU of the clients, s/GB", False),
    "machine_share_idle": ("idle share of the cores", None),
    "elapsed_s": ("measured time, s", None),
}
_MEGABYTES = ("memory_bytes",)
# Costs come after the others.
_COSTS = ("memory_bytes", "server_cpu_s_per_gb", "clients_cpu_s_per_gb", "machine_share_idle", "elapsed_s")
MEMORY = "memory_bytes_"
# In full load latency is the client's own queue.
_FULL_LOAD = ("produce", "produce with Java")
# The rate is an input, not a result, so it has no ratio.
_PACED = ("latency", "groups", "workload file")
_RATES = ("records_per_s", "megabytes_per_s")
_MAIN: dict[str, tuple[str, ...]] = {
    "latency": ("latency_p50_ms", "latency_p99_ms", "latency_p999_ms", "end_to_end_p99_ms"),
    "tail": ("records_per_s", "produced_records_per_s"),
    "groups": ("settled_s", "rebalance_s", "end_to_end_p99_ms"),
    "workload file": ("latency_p50_ms", "latency_p99_ms", "end_to_end_p99_ms"),
    "catch-up": ("records_per_s", "produced_records_per_s"),
    "replay": ("megabytes_per_s",),
    "failover": ("gap_median_s", "gap_max_s"),
    "restart": ("gap_median_s", "gap_max_s", "serves_again_s"),
    "connections": ("opened_in_s", "request_p99_ms", "memory_bytes_per_connection"),
    "growth": ("records_per_s", "share_of_before"),
    "growth of partitions": ("records_per_s", "share_of_before"),
}
_MAIN_OF_OTHERS = ("records_per_s",)
_NONE = "–"


def main_table(run: Run, cells: Sequence[str], workload: str, against: str) -> Iterator[str]:
    """One row for each cell: ours, theirs, the ratio."""
    main = [
        each for each in _MAIN.get(workload, _MAIN_OF_OTHERS) if any(each in summary.quantities(run, cell) for cell in cells)
    ]
    paced = any(carried.wanted(run, cell, summary.OURS) for cell in cells)
    titles = [*(["asked for, records/s"] if paced else []), *(SHOWN[each][0] for each in main)]
    yield f"Each entry is {summary.OURS} / {against}, with the ratio in parentheses."
    yield ""
    yield f"| cell | {' | '.join(titles)} |"
    yield f"| --- |{' --- |' * len(titles)}"
    for cell in cells:
        asked = [_asked(run, cell, against)] if paced else []
        yield f"| {cell} | {' | '.join([*asked, *(_beside(run, cell, workload, each, against) for each in main)])} |"


def _asked(run: Run, cell: str, against: str) -> str:
    rates = [carried.wanted(run, cell, system) for system in (summary.OURS, against)]
    texts = list(dict.fromkeys(_NONE if rate is None else f"{rate:,.0f}" for rate in rates))
    return " / ".join(texts)


class _Pair(NamedTuple):
    """Return both systems' figures as they are shown; without a ratio where there is none or it means nothing."""

    ours: str
    theirs: str
    ratio: float | None


def _pair(run: Run, cell: str, workload: str, quantity: str, against: str) -> _Pair:
    ours, theirs = (summary.median(run, cell, system, quantity) for system in (summary.OURS, against))
    ratio = ours / theirs if ours is not None and theirs else None
    return _Pair(
        ours=_text(run, cell, summary.OURS, quantity, ours),
        theirs=_text(run, cell, against, quantity, theirs),
        ratio=ratio if is_comparable(run, cell, workload, quantity, against) else None,
    )


def _beside(run: Run, cell: str, workload: str, quantity: str, against: str) -> str:
    pair = _pair(run, cell, workload, quantity, against)
    if pair.ours == pair.theirs == _NONE:
        return _NONE
    return f"{pair.ours} / {pair.theirs}" + (f" ({times(pair.ratio)})" if pair.ratio is not None else "")


def is_comparable(run: Run, cell: str, workload: str, quantity: str, against: str) -> bool:
    """Whether the ratio of the two systems is meaningful."""
    if quantity in _RATES and workload in _PACED:
        return False
    return not carried.is_queue(run, cell, quantity, against)


def all_tables(run: Run, cells: Sequence[str], workload: str, against: str) -> Iterator[str]:
    """All figures of the cells, and what it cost; folded away."""
    figures = list(_table(run, cells, workload, against, costs=False))
    costs = list(_table(run, cells, workload, against, costs=True))
    if figures:
        yield from ("<details>", "<summary>All figures</summary>", "", *figures, "", "</details>", "")
    if costs:
        roles = _role_table(run, cells, against)
        yield from ("<details>", "<summary>Memory and CPU</summary>", "", *costs, "", *roles, "", "</details>", "")


def _table(run: Run, cells: Sequence[str], workload: str, against: str, *, costs: bool) -> list[str]:
    """Empty without a row."""
    rows = [row for cell in cells for row in _rows(run, cell, workload, against, costs=costs)]
    head = [f"| cell | quantity | {summary.OURS} | {against} | ratio | rounds |", "| --- | --- | --- | --- | --- | --- |"]
    return [*head, *rows] if rows else []


def _rows(run: Run, cell: str, workload: str, against: str, *, costs: bool) -> Iterator[str]:
    measured = summary.quantities(run, cell)
    rounds = f"{summary.rounds(run, cell, summary.OURS)}, {summary.rounds(run, cell, against)}"
    asked = [carried.wanted(run, cell, system) for system in (summary.OURS, against)]
    if not costs and any(asked):
        texts = [_NONE if rate is None else figure(rate) for rate in asked]
        yield f"| {cell} | asked for, records/s | {' | '.join(texts)} | – | {rounds} |"
    for quantity, (title, more_is_better) in SHOWN.items():
        full_load = workload in _FULL_LOAD and quantity.startswith("latency")
        if quantity not in measured or full_load or (quantity in _COSTS) != costs:
            continue
        pair = _pair(run, cell, workload, quantity, against)
        yield f"| {cell} | {title} | {pair.ours} | {pair.theirs} | {_judged(pair.ratio, more_is_better)} | {rounds} |"


def _role_table(run: Run, cells: Sequence[str], against: str) -> Iterator[str]:
    """Return what each role used per GB written or read, and its memory at the end."""
    yield from ("| cell | system | CPU by role, s/GB | memory by role, MB |", "| --- | --- | --- | --- |")
    for cell in cells:
        for system in (summary.OURS, against):
            cpu = summary.by_role(run, cell, system, summary.SERVER)
            memory = {role: held / 1e6 for role, held in summary.by_role(run, cell, system, MEMORY).items()}
            memory.pop("per_connection", None)
            if cpu or memory:
                yield f"| {cell} | {system} | {_by_role(cpu)} | {_by_role(memory)} |"


def _by_role(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{role} {figure(value)}" for role, value in figures.items()) or _NONE


def _judged(ratio: float | None, more_is_better: bool | None) -> str:
    if ratio is None or more_is_better is None:
        return _NONE
    told = times(ratio)
    word = "equal" if told == "1.00" else "better" if (ratio > 1) == more_is_better else "worse"
    return f"{told} ({word})"


def times(ratio: float) -> str:
    """Two figures behind the point at least say something of any ratio: of a small one, too."""
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.2f}" if ratio >= 0.095 or not ratio else f"{ratio:.2g}"


def _text(run: Run, cell: str, system: str, quantity: str, value: float | None) -> str:
    """With a dagger where the load was not carried."""
    if value is None:
        return _NONE
    dagger = " †" if carried.is_about_delay(quantity) and carried.overload(run, cell, system) else ""
    return figure(value / 1e6 if quantity in _MEGABYTES else value) + dagger
