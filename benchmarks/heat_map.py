"""Heat maps of ratios as SVG: panels side by side, one colour for better and one for worse, the stronger the farther from 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

import msgspec

from benchmarks.svg import BETTER, WORSE, document

_PER_LINE = 2
_LEFT, _TOP, _GAP = 64, 40, 26
_CELL_WIDTH, _CELL_HEIGHT = 84, 30
_PANEL_HEAD, _PANEL_FOOT = 22, 20
_STRONGEST = 8.0
_FAINT, _STRONG = 0.12, 0.85


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """``values`` by row and column; ``None`` was not measured."""

    title: str
    values: Sequence[Sequence[float | None]]


def heat_map(title: str, panels: Sequence[Panel], *, rows: Sequence[str], columns: Sequence[str]) -> str:
    """An SVG document for light and dark pages; above 1 is better. Raises ``ValueError`` without panels."""
    if not panels:
        raise ValueError("a heat map needs at least one panel")
    panel_width = _LEFT + _CELL_WIDTH * len(columns)
    panel_height = _PANEL_HEAD + _CELL_HEIGHT * len(rows) + _PANEL_FOOT
    lines = -(-len(panels) // _PER_LINE)
    width = min(_PER_LINE, len(panels)) * (panel_width + _GAP)
    height = _TOP + lines * (panel_height + _GAP)
    shapes: list[str] = []
    for number, panel in enumerate(panels):
        line, place = divmod(number, _PER_LINE)
        x, y = place * (panel_width + _GAP), _TOP + line * (panel_height + _GAP)
        shapes.append(f'<g transform="translate({x} {y})">')
        shapes.extend([*_panel(panel, rows, columns), "</g>"])
    return document(title, width, height, shapes)


def _panel(panel: Panel, rows: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="14" font-weight="bold">{escape(panel.title)}</text>'
    for number, (row, values) in enumerate(zip(rows, panel.values, strict=True)):
        y = _PANEL_HEAD + number * _CELL_HEIGHT
        yield f'<text x="{_LEFT - 6}" y="{y + 20}" text-anchor="end">{escape(row)}</text>'
        for place, value in enumerate(values):
            if value is not None:
                yield from _cell(value, _LEFT + place * _CELL_WIDTH, y)
    below = _PANEL_HEAD + len(rows) * _CELL_HEIGHT + 15
    for place, column in enumerate(columns):
        yield f'<text x="{_LEFT + (place + 0.5) * _CELL_WIDTH:g}" y="{below}" text-anchor="middle">{escape(column)}</text>'


def _cell(value: float, x: int, y: int) -> Iterator[str]:
    color = BETTER if value >= 1 else WORSE
    size = f'width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}"'
    yield f'<rect x="{x}" y="{y}" {size} fill="{color}" fill-opacity="{strength(value):.2f}"/>'
    yield f'<text x="{x + _CELL_WIDTH / 2:g}" y="{y + 19}" text-anchor="middle">{value:.2f}</text>'


def strength(ratio: float) -> float:
    """Opacity by the logarithm's distance from 1; full from eight times on."""
    share = min(1.0, abs(math.log(max(ratio, 1e-9))) / math.log(_STRONGEST))
    return _FAINT + share * (_STRONG - _FAINT)
