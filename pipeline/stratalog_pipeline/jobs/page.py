"""The HTML page of a report: one self-contained file."""

from __future__ import annotations

import io
import warnings
from importlib.resources import files
from typing import Any, Final

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from stratalog_pipeline.jobs.report import Chart, Report

LABELS_MAX: Final = 400
SERIES_MAX: Final = 12
ROWS_MAX: Final = 2000
"""Maximum rows of a table on the page, which says how many it leaves out; the JSON document has all."""
_TICKS_MAX: Final = 12
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def render_page(report: Report, command: str, made_at: str) -> str:
    """Return the page. ``command`` is what made the report, ``made_at`` when."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _cell
    template = environment.from_string(files("stratalog_pipeline.jobs").joinpath("page.html").read_text())
    charts = [(chart.title, Markup(_svg(chart))) for chart in report.charts if chart.labels]
    return template.render(report=report, charts=charts, command=command, made_at=made_at, rows_max=ROWS_MAX)


def _svg(chart: Chart) -> str:
    """Draw a chart as SVG; its text stays text, and labels beyond ``LABELS_MAX`` are left out."""
    labels = [_printable(str(label))[:60] for label in chart.labels[-LABELS_MAX:]]
    places = range(len(labels))
    height = max(2.4, 0.28 * len(labels) + 0.8) if chart.is_horizontal else 3.2
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stratalog", "font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots()
        below, bars = [0.0] * len(labels), dict[str, Any]()
        for name, values in _largest(chart).items():
            shown = values[-LABELS_MAX:]
            if chart.is_horizontal:
                bars[name] = axes.barh(places, shown, left=below)
            else:
                bars[name] = axes.bar(places, shown, bottom=below, width=0.9)
            below = [low + value for low, value in zip(below, shown, strict=True)]
        if chart.is_horizontal:
            axes.set_yticks(places, labels)
            axes.invert_yaxis()
        else:
            step = max(1, -(-len(labels) // _TICKS_MAX))
            axes.set_xticks(places[::step], labels[::step])
        axis = axes.xaxis if chart.is_horizontal else axes.yaxis
        axis.set_major_formatter(lambda value, _: _size(value) if chart.unit == "bytes" else f"{value:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        if len(chart.series) > 1:
            # By default it is "best", too, but with a warning if the machine takes more than a second to find it.
            axes.legend(bars.values(), bars.keys(), loc="best", frameon=False, ncols=4, fontsize=8)
        drawn = io.StringIO()
        with warnings.catch_warnings():
            # Browsers draw the text, with fonts of their own.
            warnings.filterwarnings("ignore", r"Glyph \d+", UserWarning)
            figure.savefig(drawn, format="svg", metadata={"Date": None, "Title": chart.title})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _largest(chart: Chart) -> dict[str, list[float]]:
    """Return the largest series, and the sum of the others under ``others``."""
    ordered = sorted(chart.series.items(), key=lambda one: -sum(one[1]))
    kept = {name: list(values) for name, values in ordered[:SERIES_MAX]}
    rest = [values for _, values in ordered[SERIES_MAX:]]
    return kept | ({"others": [sum(column) for column in zip(*rest, strict=True)]} if rest else {})


def _cell(value: Any, column: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column.endswith("bytes") and isinstance(value, int | float):
        return _size(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    is_count = isinstance(value, int) and column not in ("partition", "producer_id", "run")
    return f"{value:,}" if is_count else str(value)


def _size(count: float) -> str:
    for unit in _UNITS:
        if abs(count) < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable: the last unit takes everything")
