"""The grid of a workload on the page: all ratios at a glance, as a table and as a heat map, then the figures. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from benchmarks import summary
from benchmarks.heat_map import Panel, heat_map
from benchmarks.journal import Run
from benchmarks.matrix import Workload
from stratalog_loadgen.results.report import figure

_ROWS = ("record_bytes", "batch_bytes")
_COLUMNS = ("partitions", "compression")
_UNITS = {"B": 1, "KB": 1000, "MB": 1_000_000}
_BINARY = {16_384: "16 KB", 131_072: "128 KB"}

Key = tuple[str, ...]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Names of measured cells by (record size, batch) and (partitions, codec), both sorted by size."""

    rows: list[Key]
    columns: list[Key]
    cells: dict[tuple[Key, Key], str]


def changes_of(name: str, workload: Workload) -> dict[str, str] | None:
    """Return the parameters of a cell that differ from the workload's base; ``None`` if it is not a cell of the workload."""
    rest = name.removeprefix(workload.name).split()
    if not name.startswith(workload.name) or not all("=" in word for word in rest):
        return None
    return {axis: value for axis, _, value in (word.partition("=") for word in rest)}


def grid_of(run: Run, workload: Workload) -> Grid | None:
    """``None`` unless the workload has a grid and some cell of it was measured that differs in two axes.

    What other profiles have measured of the same axes belongs to it, other values of them do not.
    """
    if not workload.products:
        return None
    axes: dict[str, set[str]] = {}
    for axis, values in (pair for product in workload.products.values() for pair in product.items()):
        axes.setdefault(axis, set()).update(map(str, values))
    cells: dict[tuple[Key, Key], str] = {}
    far = False
    for name in summary.cell_names(run):
        changes = changes_of(name, workload)
        if changes is None or any(value not in axes.get(axis, ()) for axis, value in changes.items()):
            continue
        far = far or len(changes) > 1
        settings = {axis: str(workload.base[axis]) for axis in axes} | changes
        cells[_key(settings, _ROWS), _key(settings, _COLUMNS)] = name
    if not far:
        return None
    rows, columns = ({key[part] for key in cells} for part in (0, 1))
    return Grid(rows=sorted(rows, key=_order), columns=sorted(columns, key=_order), cells=cells)


def grid_lines(run: Run, grid: Grid, against: str, picture: str) -> Iterator[str]:
    """Markdown: the picture of that name, ratios of all, figures folded away."""
    yield from (f"![Records per second, ours to {against}'s]({picture})", "")
    yield f"Ratio of records per second, ours to {against}'s: above 1, ours is faster. A row is a record size and a batch size."
    yield from ("", *_table(["record", "batch", *map(_column_text, grid.columns)], _ratio_rows(run, grid, against)), "")
    for column in grid.columns:
        yield from ("<details>", f"<summary>Figures: {_column_text(column)}</summary>", "")
        head = ["record", "batch", f"{summary.OURS}, records/s", "MB/s", f"{against}, records/s", "MB/s", "ratio"]
        yield from (*_table(head, _figure_rows(run, grid, column, against)), "", "</details>", "")


def grid_picture(run: Run, grid: Grid, against: str) -> str:
    """SVG: a panel for each number of partitions and codec, record sizes downwards, batches to the right."""
    records, batches = (sorted({row[part] for row in grid.rows}, key=int) for part in (0, 1))
    panels = []
    for column in grid.columns:
        values = [[_ratio(run, grid, (record, batch), column, against) for batch in batches] for record in records]
        panels.append(Panel(title=_column_text(column), values=values))
    return heat_map(
        f"Records per second, ours to {against}'s", panels, rows=[*map(_size, records)], columns=[*map(_batch, batches)]
    )


def _ratio_rows(run: Run, grid: Grid, against: str) -> Iterator[list[str]]:
    for row in grid.rows:
        ratios = [_ratio(run, grid, row, column, against) for column in grid.columns]
        yield [_size(row[0]), _batch(row[1]), *("" if found is None else f"{found:.2f}" for found in ratios)]


def _figure_rows(run: Run, grid: Grid, column: Key, against: str) -> Iterator[list[str]]:
    for row in grid.rows:
        cell = grid.cells.get((row, column))
        if cell is None:
            continue
        pairs = itertools.product((summary.OURS, against), ("records_per_s", "megabytes_per_s"))
        values = [summary.median(run, cell, system, quantity) for system, quantity in pairs]
        found = summary.ratio(run, cell, "records_per_s", against)
        texts = ["–" if value is None else figure(value) for value in values]
        yield [_size(row[0]), _batch(row[1]), *texts, "–" if found is None else f"{found:.2f}"]


def _ratio(run: Run, grid: Grid, row: Key, column: Key, against: str) -> float | None:
    cell = grid.cells.get((row, column))
    return None if cell is None else summary.ratio(run, cell, "records_per_s", against)


def _table(head: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _key(settings: Mapping[str, str], names: Sequence[str]) -> Key:
    return tuple(settings[name] for name in names)


def _order(key: Key) -> tuple[tuple[int, str], ...]:
    """Numbers by size, then words by the alphabet."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in key)


def column_of(settings: Mapping[str, Any]) -> str:
    """Title of the column that a cell with these settings stands in."""
    return _column_text(_key({name: str(settings[name]) for name in _COLUMNS}, _COLUMNS))


def _column_text(column: Key) -> str:
    partitions, compression = column
    return f"{int(partitions):,} partition{'s' * (partitions != '1')}, {compression}"


def _batch(size: str) -> str:
    return "1 record" if size == "1" else _size(size)


def _size(size: str) -> str:
    """Batches of powers of two by the names that they are known by."""
    number = int(size)
    unit, factor = next((unit, factor) for unit, factor in reversed(_UNITS.items()) if number >= factor)
    return _BINARY.get(number) or f"{number / factor:g} {unit}"
