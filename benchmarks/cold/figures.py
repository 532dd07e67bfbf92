"""Figures of cold reads: repeated values, their median and spread, their target. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

_DIGITS: Final = 4


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One named figure: a value for each repetition. ``target`` is None for controls and other figures without one."""

    name: str
    values: tuple[float, ...]
    target: float | None = None
    wanted: Literal["at least", "at most", "below"] = "at least"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the target; None without a target."""
        if self.target is None:
            return None
        if self.wanted == "at least":
            return self.median >= self.target
        return self.median <= self.target if self.wanted == "at most" else self.median < self.target

    def line(self) -> str:
        """``name median min=… max=… n=…``, then the target and whether it is met."""
        words = [self.name, shown(self.median), f"min={shown(min(self.values))}", f"max={shown(max(self.values))}"]
        words.append(f"n={len(self.values)}")
        if self.target is not None:
            sign = {"at least": ">=", "at most": "<=", "below": "<"}[self.wanted]
            words += [f"target{sign}{self.target:g}", "met" if self.is_met else "missed"]
        return " ".join(words)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "median": self.median,
            "values": list(self.values),
            "target": self.target,
            "wanted": self.wanted if self.target is not None else None,
            "met": self.is_met,
        }


def shown(value: float) -> str:
    """Four significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def ratios(measured: Iterable[float], controls: Iterable[float]) -> tuple[float, ...]:
    """Each measured value divided by the control of its own pair. Raises ``ValueError`` if a control is not positive."""
    pairs = list(zip(measured, controls, strict=True))
    for _, control in pairs:
        if control <= 0:
            raise ValueError(f"a control measured {control}; a ratio needs more than 0: raise the sizes")
    return tuple(value / control for value, control in pairs)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def worst_ratio(name: str, figures: Sequence[Figure], target: float) -> Figure:
    """The figure with the smallest median under another name, with ``target`` as its lower bound."""
    worst = min(figures, key=lambda figure: figure.median)
    return Figure(name=name, values=worst.values, target=target)
