"""Shared parts of all plots: an SVG with text as text on a white ground, the same bytes for the same figures."""

from __future__ import annotations

import io
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure

OURS_COLOUR: Final = "#00796b"
THEIRS_COLOUR: Final = "#9e9e9e"
BETTER_COLOUR: Final = "#2a9d8f"
WORSE_COLOUR: Final = "#d1495b"
INK: Final = "#1c2529"

_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stratalog",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; give it to :func:`svg_of` when it is drawn."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
        return figure


def styled() -> Any:
    """A context in which axes, labels and files have the style of all plots."""
    return matplotlib.rc_context(_STYLE)


def svg_of(figure: Figure) -> str:
    """The document of a figure."""
    content = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    lines = (line.rstrip() for line in content.getvalue().splitlines())
    return "\n".join(lines) + "\n"
