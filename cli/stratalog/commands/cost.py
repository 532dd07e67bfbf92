"""``stratalog cost``: what topics cost in a month, from what the store lists and metadata knows. Writes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from stratalog.cost.monthly import DAY_S, SHORTEST_S, MonthlyCost, Replays, monthly_cost
from stratalog.cost.prices import Prices, load_prices, parse_prices, shipped_names, shipped_text
from stratalog.cost.reading import read_usage
from stratalog.cost.usage import TopicUsage, total_bytes
from stratalog.output import json_option, print_json, print_rows
from stratalog.parameters import Number
from stratalog.target import addresses_or_store, metadata_options, store_of
from stratalog_core.errors import Invalid
from stratalog_core.system import SystemClock

_DEFAULT_PRICES: Final = "s3-standard"
_UNITS_S: Final = {"m": 60, "h": 3600, "d": DAY_S, "y": 365 * DAY_S}
_COLUMNS: Final = (
    "topic", "prices", "hot_bytes", "cold_bytes", "put_requests", "get_requests", "hot", "storage", "early_deletion",
    "requests", "retrieval", "egress", "total",
)  # fmt: skip
_RETENTION_COLUMNS: Final = ("topic", "prices", "retention", "cold_bytes", "storage", "early_deletion", "requests", "total")
_AMOUNTS: Final = ("hot", "storage", "early_deletion", "requests", "retrieval", "egress", "total")
_SHORT_S: Final = 0.9 * DAY_S


@click.command()
@click.argument("topics", nargs=-1)
@click.option(
    "--prices", "given", multiple=True, default=(_DEFAULT_PRICES,), show_default=True, metavar="NAME|FILE",
    help=f"Price file, or the name of a shipped one ({', '.join(shipped_names())}); repeatable, to compare.",
)  # fmt: skip
@click.option(
    "--retention", "retentions", multiple=True, metavar="TIME", help="Also price this retention (30d, 12h, 2y); repeatable."
)
@click.option(
    "--replays-per-month", type=Number(min=0), default=0.0, show_default=True,
    help="How many times a month the whole history is read from the store.",
)  # fmt: skip
@click.option(
    "--egress-share", type=Number(min=0, max=1), default=1.0, show_default=True,
    help="Share of the replayed bytes that leave the store's network; 0: readers are in its region.",
)  # fmt: skip
@click.option(
    "--window", default="1d", show_default=True, metavar="TIME",
    help="How far back requests and offloaded bytes are counted; at most the workers' [tiering] grace_ms.",
)  # fmt: skip
@click.option("--print-prices", metavar="NAME", help="Print a shipped price file, to copy and change, and do nothing else.")
@metadata_options
@json_option
def cost(
    topics: tuple[str, ...],
    given: tuple[str, ...],
    retentions: tuple[str, ...],
    replays_per_month: float,
    egress_share: float,
    window: str,
    print_prices: str | None,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Show what each topic costs in a month, and what it would cost with another retention.

    Counts the objects in the store and the requests that wrote them, and prices them with a price file. With --store alone it
    reads only the object store, and hot copies are not counted. Shipped prices are examples: check yours.
    """
    if print_prices is not None:
        _print_prices(print_prices, as_json=as_json)
        return
    prices = [load_prices(each) for each in given]
    durations = [duration_s(each) for each in retentions]
    replays = Replays(per_month=replays_per_month, egress_share=egress_share)
    addresses = addresses_or_store(data, metadata, store)
    found = asyncio.run(
        read_usage(addresses, store_of(data, store), topics, window_s=duration_s(window), now_ms=SystemClock().wall_ms())
    )
    now = [monthly_cost(usage, each, replays) for usage in found for each in prices]
    other = [monthly_cost(usage, each, replays, seconds / DAY_S) for usage in found for seconds in durations for each in prices]
    if as_json:
        print_json(_document(found, prices, now, other))
        return
    print_rows([_row(each) for each in now], _COLUMNS, title="in a month")
    if other:
        print_rows([_row(each) for each in other], _RETENTION_COLUMNS, title="in a month, with another retention")
    _print_totals(now, prices)
    _print_notes(found, prices)


def duration_s(text: str) -> int:
    """Seconds of ``30d``, ``12h``, ``15m`` or ``2y``. Raises ``Invalid``."""
    found = re.fullmatch(r"([1-9]\d{0,4})([mhdy])", text)
    if found is None:
        raise Invalid(f"{text!r} is not a duration: give a number and a unit, such as 30d, 12h, 15m or 2y")
    return int(found[1]) * _UNITS_S[found[2]]


def _print_prices(name: str, *, as_json: bool) -> None:
    text = shipped_text(name)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(parse_prices(text, name)))
    else:
        click.echo(text, nl=False)


def _document(
    found: Sequence[TopicUsage], prices: Sequence[Prices], now: Sequence[MonthlyCost], other: Sequence[MonthlyCost]
) -> dict[str, Any]:
    return {
        "prices": [{"name": each.name, "currency": each.currency, "as_of": each.as_of} for each in prices],
        "topics": [_usage_row(usage) for usage in found],
        "costs": [_cost_row(each) for each in now],
        "retentions": [_cost_row(each) for each in other],
    }


def _usage_row(usage: TopicUsage) -> dict[str, Any]:
    activity = usage.activity
    return {
        "topic": usage.topic,
        "partitions": usage.partitions,
        "hot_bytes": usage.hot_bytes,
        "live_bytes": usage.live_bytes,
        "live_segments": usage.live.total(),
        "removed_bytes": total_bytes(usage.removed),
        "removed_segments": usage.removed.total(),
        "other_bytes": total_bytes(usage.others),
        "other_objects": usage.others.total(),
        "storage_classes": sorted(usage.storage_classes),
        "observed": {
            "seconds": activity.seconds,
            "offloads": activity.offloads,
            "offloaded_bytes": activity.offloaded_bytes,
            "merges": activity.merges,
            "commits": activity.commits,
            "put_requests": activity.requests.puts,
            "get_requests": activity.requests.gets,
        },
        "sweep_listings_per_day": usage.sweep_listings,
        "replay_get_requests": usage.replay_requests.gets,
    }


def _cost_row(cost: MonthlyCost) -> dict[str, Any]:
    return {**dataclasses.asdict(cost), "total": cost.total}


def _row(cost: MonthlyCost) -> dict[str, Any]:
    row = _cost_row(cost)
    days = cost.retention_days
    row["retention"] = "" if days is None else f"{days:g}d"
    return row | {name: _amount(row[name]) for name in _AMOUNTS}


def _amount(value: float | None) -> float | None:
    """An amount to the cent, or to a hundredth of it if it is less than one."""
    return None if value is None else round(value, 2 if value >= 1 else 4)


def _print_totals(costs: Sequence[MonthlyCost], prices: Sequence[Prices]) -> None:
    for each in prices:
        total = sum(cost.total for cost in costs if cost.prices == each.name)
        click.echo(f"{each.name}: {_amount(total)} {each.currency} a month in all, by prices as of {each.as_of}")


def _print_notes(found: Sequence[TopicUsage], prices: Sequence[Prices]) -> None:
    """Say on stderr what limits the figures."""
    short = [usage for usage in found if usage.activity.seconds < _SHORT_S]
    if short:
        least = min(usage.activity.seconds for usage in short)
        names = ", ".join(usage.topic for usage in short[:5])
        time = f"{least / 3600:.1f} hours" if least >= SHORTEST_S else "less than an hour"
        click.echo(
            f"requests and offloaded bytes of {names} are projected from {time} of activity: run this again after a day",
            err=True,
        )
    priced = {each.segments.storage_class for each in prices} | {""}
    for usage in found:
        for unpriced in sorted(usage.storage_classes - priced):
            click.echo(f"{usage.topic} has segments of class {unpriced}; none of the --prices is for that class", err=True)
    if any(usage.hot_bytes is None for usage in found):
        click.echo("hot copies are not counted: name the cluster with --data or --metadata", err=True)
