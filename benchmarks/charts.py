"""Bars of ratios on a logarithmic scale around 1, with goals as marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from benchmarks.drawing import BETTER_COLOUR, INK, WORSE_COLOUR, new_figure, styled, svg_of

_TICKS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20, 50)
_ROW_INCHES: Final = 0.3


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """``ratio`` is ours to theirs; ``goal`` is drawn as a mark."""

    label: str
    ratio: float
    more_is_better: bool
    goal: float | None = None

    @property
    def is_better(self) -> bool:
        return (self.ratio >= 1) == self.more_is_better


def ratio_chart(title: str, bars: Sequence[Bar]) -> str:
    """An SVG document. Raises ``ValueError`` without bars."""
    if not bars:
        raise ValueError("a chart needs at least one bar")
    figure = new_figure(9.5, 1.1 + _ROW_INCHES * len(bars))
    with styled():
        axes = figure.add_subplot()
        places = range(len(bars))
        colours = [BETTER_COLOUR if bar.is_better else WORSE_COLOUR for bar in bars]
        axes.barh(places, [bar.ratio - 1 for bar in bars], left=1, color=colours, height=0.6)
        for place, bar in zip(places, bars, strict=True):
            beside = (max(bar.ratio, 1), place)
            axes.annotate(f"{bar.ratio:.2f}", beside, xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
            if bar.goal:
                axes.plot([bar.goal, bar.goal], [place - 0.4, place + 0.4], color=INK, linewidth=2.5)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xscale("log")
        low, high = _range(bars)
        axes.set_xlim(low, high)
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(axis="x", alpha=0.25)
        axes.set_yticks(places, [bar.label for bar in bars])
        axes.invert_yaxis()
        has_goals = title.endswith(")") and any(bar.goal for bar in bars)
        axes.set_title(f"{title[:-1]}; mark: goal)" if has_goals else title, loc="left")
    return svg_of(figure)


def _range(bars: Sequence[Bar]) -> tuple[float, float]:
    """Limits of the scale that hold all ratios and goals with the figures beside them, and 1."""
    values = [1.0, *(bar.ratio for bar in bars), *(bar.goal for bar in bars if bar.goal)]
    return min(values) / 1.3, max(values) * 1.6
