"""Prints a result: what ran, then what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from stratalog.output import print_json, print_rows
from stratalog_loadgen.results.result import CARRIED_MIN, Result, carried_share

_PACE_S = 1.0


def print_result(result: Result, *, as_json: bool) -> None:
    """Print a result on standard output. Warns on standard error if the load fell behind its rate."""
    share = carried_share(result.settings, result.measured)
    if share is not None and share < CARRIED_MIN:
        wanted = result.settings["wanted_records_per_s"]
        click.echo(
            f"stratalog: only {share:.0%} of {wanted:,.0f} records/s were sent: the latencies are of a queue that grew until "
            "the end. Lower --rate, or measure the maximum with `stratalog bench produce`.",
            err=True,
        )
    if as_json:
        print_json(msgspec.to_builtins(result))
        return
    click.echo(f"{result.what}, {result.at}, {result.machine['cores']} cores, {result.machine['system']}")
    click.echo(f"client: {result.client}")
    click.echo(f"settings: {', '.join(f'{name}={value}' for name, value in flat(result.settings))}")
    rows = [{"quantity": name, "value": figure(value)} for name, value in result.measured.items() if value is not None]
    print_rows(rows, ("quantity", "value"))


class Pace:
    """The rate at which a count grows. ``per_s`` covers about the last second."""

    def __init__(self) -> None:
        self._count, self._at = 0, 0.0
        self.per_s = 0.0

    def note(self, count: int, now: float) -> None:
        """Take a count at the time ``now`` (seconds). A count that falls starts a new measurement."""
        if not self._at or count < self._count:
            self._count, self._at = count, now
        elif now - self._at >= _PACE_S:
            self.per_s = (count - self._count) / (now - self._at)
            self._count, self._at = count, now


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return names and values, nested ones as ``outer.inner``, without unset ones."""
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            pairs.extend(flat(value, f"{prefix}{name}."))
        elif value is not None and value is not False and value != "":
            pairs.append((f"{prefix}{name}", value))
    return pairs


def figure(value: Any) -> str:
    """Return a value as text with three significant digits, which is all that a shared machine can measure."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
