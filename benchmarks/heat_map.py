"""Heat maps of ratios: panels side by side, one colour for better and one for worse, the stronger the farther from 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from benchmarks.drawing import BETTER_COLOUR, INK, WORSE_COLOUR, new_figure, styled, svg_of

_PER_LINE: Final = 2
_STRONGEST: Final = 8.0
_FAINT, _STRONG = 0.12, 0.85


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """``values`` by row and column; ``None`` was not measured."""

    title: str
    values: Sequence[Sequence[float | None]]


def heat_map(title: str, panels: Sequence[Panel], *, rows: Sequence[str], columns: Sequence[str]) -> str:
    """An SVG document; above 1 is better. Raises ``ValueError`` without panels."""
    if not panels:
        raise ValueError("a heat map needs at least one panel")
    across = min(_PER_LINE, len(panels))
    down = -(-len(panels) // _PER_LINE)
    figure = new_figure(1.2 + across * (0.9 * len(columns) + 0.9), 0.7 + down * (0.34 * len(rows) + 0.75))
    with styled():
        figure.suptitle(title, x=0.01, ha="left")
        grid = figure.subplots(down, across, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place < len(panels):
                _draw(axes, panels[place], rows, columns)
            else:
                axes.set_axis_off()
    return svg_of(figure)


def _draw(axes: Axes, panel: Panel, rows: Sequence[str], columns: Sequence[str]) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    for row, values in enumerate(panel.values):
        for column, value in enumerate(values):
            if value is not None:
                _cell(axes, column, row, value)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([column + 0.5 for column in range(len(columns))], columns)
    axes.set_yticks([row + 0.5 for row in range(len(rows))], rows)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _cell(axes: Axes, column: int, row: int, value: float) -> None:
    colour = BETTER_COLOUR if value >= 1 else WORSE_COLOUR
    axes.add_patch(Rectangle((column + 0.02, row + 0.04), 0.96, 0.92, facecolor=colour, alpha=strength(value), linewidth=0))
    axes.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", color=INK, fontsize=9)


def strength(ratio: float) -> float:
    """Opacity by the logarithm's distance from 1; full from eight times on."""
    share = min(1.0, abs(math.log(max(ratio, 1e-9))) / math.log(_STRONGEST))
    return _FAINT + share * (_STRONG - _FAINT)
