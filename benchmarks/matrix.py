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
    """

    rounds: int
    warmup_s: float
    duration_s: float
    vary: int
    warm_cluster_s: float = 0.0
    history_share: float = 1.0
    partitions_max: int = 1_000_000
    records_max: int = 1_000_000_000
    connections_max: int = 1_000_000
    consumers_max: int = 1_000_000
    producers_max: int = 1_000_000


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``fresh`` cells break their cluster and get one of their own."""

    name: str
    kind: str
    title: str
    base: dict[str, Any]
    axes: dict[str, list[Any]] = {}
    profiles: dict[str, list[dict[str, Any]]] = {}
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


def read_matrix(path: Path = FILE) -> Matrix:
    """Raises ``msgspec.ValidationError`` that names what is wrong."""
    return msgspec.convert(tomllib.loads(path.read_text()), Matrix)


def cells_of(matrix: Matrix, profile: str, pattern: str = "*") -> list[Cell]:
    """In the order of the file; those that need a cluster of their own last. ``pattern`` is a shell pattern of names.

    Raises ``KeyError`` for an unknown profile.
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
    chosen = [cell for cell in cells if fnmatch.fnmatchcase(cell.name, pattern)]
    return sorted(chosen, key=lambda cell: cell.fresh)


def _variants(workload: Workload, profile: str, vary: int) -> Iterator[Mapping[str, Any]]:
    """Those listed for the profile, or all that differ from the base in ``vary`` axes at most."""
    if profile in workload.profiles:
        yield from workload.profiles[profile]
        return
    for count in range(vary + 1):
        for names in itertools.combinations(workload.axes, count):
            for values in itertools.product(*(workload.axes[name] for name in names)):
                yield dict(zip(names, values, strict=True))


def _name(workload: Workload, changes: Mapping[str, Any]) -> str:
    return " ".join([workload.name, *(f"{name}={value}" for name, value in changes.items())])


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
