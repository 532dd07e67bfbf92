"""Names of cells in words: ``latency rate_share=0.1 linger_ms=5`` is "latency: 10 % of its maximum rate, 5 ms linger". Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stratalog_loadgen.results.report import figure

_UNITS: Final = ((1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "KB"), (1, "B"))


def _bytes(value: str) -> str:
    """A size; batches of powers of two by the names that they are known by."""
    number = int(value)
    if number in {16_384, 131_072}:
        return f"{number // 1024} KiB"
    size, unit = next(each for each in _UNITS if number >= each[0])
    return f"{number / size:g} {unit}"


def _batch(value: str) -> str:
    return "one record a batch" if value == "1" else f"{_bytes(value)} batches"


def _count(noun: str) -> Callable[[str], str]:
    return lambda value: f"{figure(float(value))} {noun}" + ("s" if value != "1" else "")


_WORDS: Final[dict[str, Callable[[str], str]]] = {
    "batch_bytes": _batch,
    "record_bytes": lambda value: f"{_bytes(value)} records",
    "history_bytes": lambda value: f"{_bytes(value)} of history",
    "partitions": _count("partition"),
    "produced_partitions": lambda value: f"{value} of them written to",
    "producers": _count("producer"),
    "consumers": _count("consumer"),
    "groups": _count("group"),
    "connections": _count("connection"),
    "rate": lambda value: f"{figure(float(value))} records/s",
    "rate_per_partition": lambda value: f"{float(value):g} record/s each",
    "rate_share": lambda value: f"{float(value):.0%} of its maximum rate".replace("%", " %"),
    "linger_ms": lambda value: f"{value} ms linger",
    "seconds": lambda value: f"for {value} s",
    "compression": lambda value: f"{value} compression",
    "light": lambda value: "light members",
    "protocol": lambda value: f"{value} protocol",
}


def label_of(cell: str) -> str:
    """The cell's name in words. A setting without words stays as it is."""
    words = cell.split()
    name = " ".join(word for word in words if "=" not in word)
    settings = [word.partition("=") for word in words if "=" in word]
    words = [_WORDS[key](value) if key in _WORDS else f"{key} {value}" for key, _, value in settings]
    return f"{name}: {', '.join(words) or 'base load'}"
