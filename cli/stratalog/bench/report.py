"""A result for people: what ran, then what came out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from stratalog.bench.results import Result
from stratalog.output import print_json, print_rows


def print_result(result: Result, *, as_json: bool) -> None:
    """On standard output."""
    if as_json:
        print_json(msgspec.to_builtins(result))
        return
    click.echo(f"{result.what}, {result.at}, {result.machine['cores']} cores, {result.machine['system']}")
    click.echo(f"client: {result.client}")
    click.echo(f"settings: {', '.join(f'{name}={value}' for name, value in flat(result.settings))}")
    rows = [{"quantity": name, "value": figure(value)} for name, value in result.measured.items() if value is not None]
    print_rows(rows, ("quantity", "value"))


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Names and values; nested ones as ``outer.inner``; what is unset is left out."""
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            pairs.extend(flat(value, f"{prefix}{name}."))
        elif value is not None and value is not False and value != "":
            pairs.append((f"{prefix}{name}", value))
    return pairs


def figure(value: Any) -> str:
    """Three figures are all that a measurement on a shared machine can say."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
