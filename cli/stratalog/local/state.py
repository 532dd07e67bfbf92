"""``cluster.json``: the processes of a data directory and their addresses. Written by ``cluster start``, read by all commands.

It always lists all processes of the cluster; one that is not running has no ``pid``. It contains no secrets.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from stratalog_core.errors import Conflict, Invalid, NotFound
from stratalog_core.malformed import MALFORMED

EMBEDDED_ROLE: Final = "all"
"""The role of the process of ``stratalog up``."""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``started_at`` (seconds since 1970) tells it from another that got the same ``pid`` later. ``http`` is the
    address of its metrics and health endpoints, empty if it has none.
    """

    name: str
    role: str
    address: str
    pid: int | None = None
    started_at: float = 0.0
    http: str = ""


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """``bootstrap`` and ``metadata`` are comma-separated addresses; ``store`` is a URL, and ``second_store`` one or empty.

    ``object_lock``: the bucket of the cluster's own MinIO has Object Lock.
    """

    bootstrap: str
    metadata: str
    store: str
    processes: tuple[ProcessState, ...]
    object_lock: bool = False
    second_store: str = ""

    def process(self, name: str) -> ProcessState:
        """Return the process of this name. Raises ``NotFound`` with the names that exist."""
        for process in self.processes:
            if process.name == name:
                return process
        raise NotFound(f"no process {name!r}; there are {', '.join(process.name for process in self.processes)}")

    @property
    def is_embedded(self) -> bool:
        """Whether `stratalog up` runs everything in one process."""
        return bool(self.of_role(EMBEDDED_ROLE))

    def of_role(self, role: str) -> list[ProcessState]:
        return [process for process in self.processes if process.role == role]

    def replaced(self, process: ProcessState) -> ClusterState:
        """Return the cluster with this process in its new state."""
        processes = tuple(process if old.name == process.name else old for old in self.processes)
        return msgspec.structs.replace(self, processes=processes)


def state_path(data: Path) -> Path:
    return data / "cluster.json"


def load_state(data: Path) -> ClusterState:
    """Return the cluster of a directory. Raises ``NotFound`` if it holds none, ``Invalid`` if the file cannot be decoded."""
    try:
        return msgspec.json.decode(state_path(data).read_bytes(), type=ClusterState)
    except FileNotFoundError as missing:
        starts = f"`stratalog up --data {data}` or `stratalog cluster start --data {data}`"
        raise NotFound(f"no cluster in {data}: start one with {starts}") from missing
    except MALFORMED as malformed:
        raise Invalid(f"{state_path(data)} cannot be read: {malformed}") from malformed


def refuse_cluster(data: Path, remedy: str) -> None:
    """Raise ``Conflict`` that names ``remedy`` if the directory holds a cluster of several processes."""
    if state_path(data).exists() and any(process.role != EMBEDDED_ROLE for process in load_state(data).processes):
        raise Conflict(f"{data} holds a cluster of processes: {remedy}")


@contextmanager
def changing(data: Path) -> Iterator[None]:
    """Wait until no other process changes ``cluster.json``, and keep others from it meanwhile: read, change and save within."""
    with (data / "cluster.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def save_state(data: Path, state: ClusterState) -> None:
    replace_file(state_path(data), msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically, so that a reader never sees a partial one."""
    aside = path.with_suffix(".tmp")
    aside.write_bytes(content)
    os.replace(aside, path)
