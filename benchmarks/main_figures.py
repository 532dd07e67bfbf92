"""``docs/explanation/benchmarks.md`` from a recorded run: a table and a picture of the main figures; the rest is by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from matplotlib.axes import Axes

from benchmarks import summary
from benchmarks.drawing import OURS_COLOUR, THEIRS_COLOUR, new_figure, styled, svg_of
from benchmarks.journal import Run
from benchmarks.summary import OURS
from stratalog_loadgen.results.report import figure

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PAGE: Final = Path(__file__).parents[1] / "docs" / "explanation" / "benchmarks.md"
PICTURE: Final = PAGE.parent / "images" / "benchmarks.svg"


class MainFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table; ``short`` is its label in the picture. Values are divided by ``scale`` for ``unit``."""

    cell: str
    quantity: str
    text: str
    short: str
    unit: str
    scale: float = 1.0


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the picture: figures of one unit."""

    title: str
    figures: tuple[MainFigure, ...]


def _rate(cell: str, text: str, short: str) -> MainFigure:
    return MainFigure(cell=cell, quantity="records_per_s", text=f"{text}, records/s", short=short, unit="k/s", scale=1000)


def _p99(cell: str, text: str, short: str) -> MainFigure:
    return MainFigure(
        cell=cell, quantity="latency_p99_ms", text=f"99th percentile of acknowledgements, {text}", short=short, unit="ms"
    )


def _gap(cell: str, text: str, short: str) -> MainFigure:
    what = f"time without acknowledgements after kill -9 of a broker, median, {text}"
    return MainFigure(cell=cell, quantity="gap_median_s", text=what, short=short, unit="s")


def _memory(cell: str, text: str, short: str) -> MainFigure:
    return MainFigure(cell=cell, quantity="memory_bytes", text=text, short=short, unit="MB", scale=1e6)


CHARTS: Final = (
    Chart(
        title="Thousand records of 1 KB per second (more is better)",
        figures=(
            _rate("produce", "produce, 128 KiB batches", "128 KiB batches"),
            _rate("produce batch_bytes=1000000", "produce, 1 MB batches", "1 MB batches"),
            _rate("produce partitions=10000", "produce to 10,000 partitions, 128 KiB batches", "10,000 partitions"),
            _rate("produce with Java", "produce, Kafka's Java client, 128 KiB batches", "Java client"),
            _rate("tail groups=5", "five groups read what is written", "five groups read"),
        ),
    ),
    Chart(
        title="99th percentile of acknowledgements, ms (less is better)",
        figures=(
            _p99("latency", "2,000 records/s, no linger", "2,000 records/s"),
            _p99("latency rate=20000 linger_ms=5 seconds=30", "20,000 records/s, 5 ms linger", "20,000 records/s"),
            _p99("latency rate_share=0.5 linger_ms=5", "half of its own maximum rate, 5 ms linger", "half of its maximum"),
        ),
    ),
    Chart(
        title="Seconds without acknowledgements after kill -9 (less is better)",
        figures=(
            _gap("failover partitions=100", "100 partitions", "100 partitions"),
            _gap(
                "failover partitions=10000 produced_partitions=24 rate_per_partition=1.0",
                "10,000 partitions, 24 of them written to",
                "10,000 partitions",
            ),
        ),
    ),
    Chart(
        title="Memory of the whole cluster, MB (less is better)",
        figures=(_memory("produce", "memory of the whole cluster", "all processes"),),
    ),
)


def write_main_figures(name: str, run: Run, against: str, *, page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Replace what stands between the markers of ``page``, and the picture. A run that lacks a main figure changes nothing."""
    if any(_values(run, each, against) is None for chart in CHARTS for each in chart.figures):
        return
    before, rest = page.read_text().split(BEGIN, 1)
    _, after = rest.split(END, 1)
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(_table(name, run, against)) + f"\n{END}{after}")
    picture.write_text(main_picture(run, against))


def _values(run: Run, wanted: MainFigure, against: str) -> tuple[float, float] | None:
    """Ours and theirs; ``None`` if one was not measured."""
    ours, theirs = (summary.median(run, wanted.cell, system, wanted.quantity) for system in (OURS, against))
    return None if ours is None or not theirs else (ours / wanted.scale, theirs / wanted.scale)


def _table(name: str, run: Run, against: str) -> Iterator[str]:
    yield "| | Stratalog | Kafka | ratio |"
    yield "| --- | --- | --- | --- |"
    for each in (each for chart in CHARTS for each in chart.figures):
        values = _values(run, each, against)
        assert values is not None
        ours, theirs = (_shown(value, each.unit) for value in values)
        yield f"| {each.text} | {ours} | {theirs} | {values[0] / values[1]:.2f} × |"
    yield ""
    day = min(row.at for row in run.rows)[:10]
    yield f"Medians of run `{name}`, {day}, on {run.machine['cores']} cores that clients and servers share."


def _shown(value: float, unit: str) -> str:
    return figure(round(value * 1000, -3)) if unit == "k/s" else f"{figure(value)} {unit}"


def main_picture(run: Run, against: str) -> str:
    """SVG: a chart for each unit, a pair of bars for each figure."""
    drawing = new_figure(11, 6.4)
    with styled():
        heights = [len(chart.figures) for chart in CHARTS]
        parts = drawing.subplots(2, 2, height_ratios=[max(heights[:2]), max(heights[2:]) + 0.4])
        for axes, chart in zip(parts.flat, CHARTS, strict=True):
            values = [pair for each in chart.figures if (pair := _values(run, each, against))]
            _draw(axes, chart, values)
        handles, labels = parts.flat[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return svg_of(drawing)


def _draw(axes: Axes, chart: Chart, values: Sequence[tuple[float, float]]) -> None:
    for shift, label, colour, side in ((-0.2, "Stratalog", OURS_COLOUR, 0), (0.2, "Apache Kafka", THEIRS_COLOUR, 1)):
        heights = [pair[side] for pair in values]
        bars = axes.barh([place + shift for place in range(len(values))], heights, height=0.38, color=colour, label=label)
        axes.bar_label(bars, labels=[figure(value) for value in heights], padding=3, fontsize=9)
    axes.set_yticks(range(len(values)), [each.short for each in chart.figures])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, max(max(pair) for pair in values) * 1.18)
    axes.set_title(chart.title, loc="left", fontsize=10)
