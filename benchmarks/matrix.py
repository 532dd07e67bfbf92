"""The declared matrix: workloads, profiles and goals of ``matrix.toml``, and the cells that they come to. Pure."""

from __future__ import annotations

import fnmatch
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).with_name("matrix.toml")


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long and how often; the ``…_max`` and ``history_share`` make a smoke run small.

    ``warm_cluster_s`` is how long the matrix's warm-up loads work on every new cluster, together, before its first cell.
    ``vary`` below 0 measures only what workloads list for the profile. ``cells_per_cluster`` lets systems take turns after so
    many cells (0: after all), so that a run that is broken off has compared something.
    """

    rounds: int
    warmup_s: float
    duration_s: float
    vary: int
    warmup_per_partition_s: float = 0.002
    warm_cluster_s: float = 0.0
    cells_per_cluster: int = 0
    history_share: float = 1.0
    partitions_max: int = 1_000_000
    records_max: int = 1_000_000_000
    connections_max: int = 1_000_000
    consumers_max: int = 1_000_000
    producers_max: int = 1_000_000


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``profiles`` lists a profile's cells; ``products`` has values of axes that are combined in full, the first slowest.

    ``fresh`` cells break their cluster and get one of their own.
    """

    name: str
    kind: str
    title: str
    base: dict[str, Any]
    axes: dict[str, list[Any]] = {}
    profiles: dict[str, list[dict[str, Any]]] = {}
    products: dict[str, dict[str, list[Any]]] = {}
    fresh: bool = False


class Goal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound on a ratio of medians, in all cells whose names match ``cells`` (shell patterns)."""

    title: str
    cells: str
    quantity: str
    at_least: float | None = None
    at_most: float | None = None
    over: str | None = None

    def covers(self, cell: str) -> bool:
        return fnmatch.fnmatchcase(cell, self.cells)

    def reached(self, ratio: float) -> bool:
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)


class WarmUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Produced and read on every new cluster, each for an equal part of the profile's time."""

    record_bytes: int
    batch_bytes: int
    partitions: int


class Matrix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    profiles: dict[str, Profile]
    warm_up: list[WarmUp]
    workloads: list[Workload]
    goals: list[Goal]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure on each system. ``name`` is the workload's and what differs from its base."""

    name: str
    kind: str
    title: str
    settings: dict[str, Any]
    fresh: bool = False

    def duration_s(self, profile: Profile) -> float:
        """How long it counts: as its profile says, or ``seconds`` of its own."""
        return float(self.settings.get("seconds", profile.duration_s))


def read_matrix(path: Path = FILE) -> Matrix:
    """Raises ``msgspec.ValidationError`` that names what is wrong."""
    return msgspec.convert(tomllib.loads(path.read_text()), Matrix)


def cells_of(matrix: Matrix, profile: str, *patterns: str) -> list[Cell]:
    """In the order of the shell ``patterns`` of names, of the file within one; those that need a cluster of their own last.

    Without patterns all. Raises ``KeyError`` for an unknown profile.
    """
    shape = matrix.profiles[profile]
    cells = [
        Cell(
            name=_name(workload, changes),
            kind=workload.kind,
            title=workload.title,
            settings=_bounded({**workload.base, **changes}, shape),
            fresh=workload.fresh,
        )
        for workload in matrix.workloads
        for changes in _variants(workload, profile, shape.vary)
    ]
    wanted = patterns or ("*",)
    found = {cell.name: cell for pattern in wanted for cell in cells if fnmatch.fnmatchcase(cell.name, pattern)}
    return sorted(found.values(), key=lambda cell: cell.fresh)


def _variants(workload: Workload, profile: str, vary: int) -> Iterator[Mapping[str, Any]]:
    """Those listed for the profile, or combined for it, or all that differ from the base in ``vary`` axes at most.

    What is combined leaves out batches that are smaller than one record.
    """
    if profile in workload.profiles:
        yield from workload.profiles[profile]
        return
    for changes in _product(workload, workload.products[profile]) if profile in workload.products else _varied(workload, vary):
        if _holds_a_record({**workload.base, **changes}):
            yield changes


def _varied(workload: Workload, vary: int) -> Iterator[dict[str, Any]]:
    for count in range(vary + 1):
        for names in itertools.combinations(workload.axes, count):
            for values in itertools.product(*(workload.axes[name] for name in names)):
                yield dict(zip(names, values, strict=True))


def _product(workload: Workload, axes: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Named as other cells are: only what differs from the base, in the order of the workload's axes."""
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        yield {name: chosen[name] for name in workload.axes if name in chosen and chosen[name] != workload.base[name]}


def _holds_a_record(settings: Mapping[str, Any]) -> bool:
    """A batch of one byte stands for one record per batch."""
    batch_bytes = settings.get("batch_bytes", 1)
    return bool(batch_bytes == 1 or batch_bytes >= settings["record_bytes"])


def _name(workload: Workload, changes: Mapping[str, Any]) -> str:
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in changes.items()}
    return " ".join([workload.name, *(f"{name}={text}" for name, text in texts.items())])


def _bounded(settings: dict[str, Any], profile: Profile) -> dict[str, Any]:
    limits = {
        "partitions": profile.partitions_max,
        "records": profile.records_max,
        "connections": profile.connections_max,
        "consumers": profile.consumers_max,
        "producers": profile.producers_max,
    }
    bounded = {name: min(value, limits[name]) if name in limits else value for name, value in settings.items()}
    if "history_bytes" in bounded:
        bounded["history_bytes"] = round(bounded["history_bytes"] * profile.history_share)
    return bounded
