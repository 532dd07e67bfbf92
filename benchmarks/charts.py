"""One kind of picture, as SVG: bars of ratios on a logarithmic scale around 1, with goals; for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

import msgspec

from benchmarks.svg import BETTER, INK, WORSE, document

_PLOT, _RIGHT = 430, 70
# Of a letter in the labels' size, on the safe side: labels are never cut off.
_LETTER = 6.8
_ROW, _BAR, _TOP, _BOTTOM = 24, 14, 44, 30
_TICKS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20)
_GRID = f"{INK}40"


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """``ratio`` is ours to theirs; ``goal`` is drawn as a mark."""

    label: str
    ratio: float
    more_is_better: bool
    goal: float | None = None


def ratio_chart(title: str, bars: Sequence[Bar]) -> str:
    """An SVG document. Raises ``ValueError`` without bars."""
    if not bars:
        raise ValueError("a chart needs at least one bar")
    low, high = _range(bars)
    scale = _Scale(low=low, high=high, left=math.ceil(max(len(bar.label) for bar in bars) * _LETTER) + 16)
    height = _TOP + _ROW * len(bars) + _BOTTOM
    rows = (line for number, bar in enumerate(bars) for line in _bar(bar, _TOP + number * _ROW, scale))
    told = f"{title[:-1]}; mark: goal)" if title.endswith(")") and any(bar.goal for bar in bars) else title
    return document(told, scale.left + _PLOT + _RIGHT, height, [*_grid(scale, height), *rows])


class _Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios at both ends of the plot, which begins at ``left``."""

    low: float
    high: float
    left: int

    def x(self, ratio: float) -> float:
        share = (math.log(ratio) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return round(self.left + min(1.0, max(0.0, share)) * _PLOT, 1)


def _range(bars: Sequence[Bar]) -> tuple[float, float]:
    """Ticks that hold all ratios and goals, and 1."""
    values = [1.0, *(bar.ratio for bar in bars), *(bar.goal for bar in bars if bar.goal)]
    low = max((tick for tick in _TICKS if tick <= min(values)), default=_TICKS[0])
    high = min((tick for tick in _TICKS if tick >= max(values)), default=_TICKS[-1])
    return (low, high) if low < high else (0.5, 2)


def _grid(scale: _Scale, height: int) -> list[str]:
    lines = []
    for tick in _TICKS:
        if scale.low <= tick <= scale.high:
            x, color = scale.x(tick), INK if tick == 1 else _GRID
            lines.append(f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{height - _BOTTOM}" stroke="{color}"/>')
            lines.append(f'<text x="{x}" y="{height - 10}" text-anchor="middle">{tick:g}</text>')
    return lines


def _bar(bar: Bar, y: float, scale: _Scale) -> list[str]:
    one, here = scale.x(1), scale.x(max(bar.ratio, _TICKS[0] / 10))
    color = BETTER if (bar.ratio >= 1) == bar.more_is_better else WORSE
    lines = [
        f'<text x="{scale.left - 8}" y="{y + _BAR - 2}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect x="{min(one, here)}" y="{y}" width="{round(abs(here - one), 1)}" height="{_BAR}" fill="{color}"/>',
        f'<text x="{max(one, here) + 6}" y="{y + _BAR - 2}">{bar.ratio:.2f}</text>',
    ]
    if bar.goal:
        x = scale.x(bar.goal)
        lines.append(f'<line x1="{x}" y1="{y - 3}" x2="{x}" y2="{y + _BAR + 3}" stroke="{INK}" stroke-width="3"/>')
    return lines
