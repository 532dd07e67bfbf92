"""The compared systems behind one interface: start, serve, lose a broker, report their resource use, stop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from benchmarks.kafka_control import KafkaCluster

_COMMAND_TIMEOUT_S = 1800

DESCRIPTIONS = {
    "stratalog": "3 metadata nodes, 3 bookies, 2 brokers, 1 tiering worker; every acknowledgement is fsynced on two bookies",
    "kafka": "Apache Kafka 4.3.1, 3 brokers that are controllers, heap 1 GiB; acknowledges from the page cache, its default; "
    "a new group waits 0.5 s for members, as ours does",
    "kafka-fsync": "Apache Kafka 4.3.1, the same with log.flush.interval.messages=1: fsync before the acknowledgement",
}


class System(Protocol):
    """A running cluster with three copies of everything."""

    @property
    def name(self) -> str: ...

    @property
    def bootstrap(self) -> str: ...

    def kill_broker(self) -> int:
        """SIGKILL one broker; its id."""
        ...

    def stop_broker(self) -> None:
        """Stop one broker by a controlled shutdown."""
        ...

    def start_broker(self) -> None:
        """Start the broker that was stopped; returns when it serves."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Memory of its processes by role: proportional set size, so that pages shared between processes count once."""
        ...

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that its processes have used so far, by role."""
        ...

    def pids(self) -> list[tuple[str, int]]:
        """Role and id of every process."""
        ...

    def make_cold(self, topic: str) -> bool:
        """Move all of ``topic`` to the object store and drop the hot copies; false if the system has no such thing."""
        ...


class _Kafka:
    def __init__(self, name: str, cluster: KafkaCluster) -> None:
        self.name = name
        self._cluster = cluster

    @property
    def bootstrap(self) -> str:
        return self._cluster.bootstrap

    def kill_broker(self) -> int:
        self._cluster.kill(1)
        return 1

    def stop_broker(self) -> None:
        self._cluster.stop(1)

    def start_broker(self) -> None:
        self._cluster.start(1)

    def memory_bytes(self) -> dict[str, int]:
        return _by_role(self.pids(), _memory_bytes)

    def cpu_s(self) -> dict[str, float]:
        return _by_role(self.pids(), cpu_s_of)

    def pids(self) -> list[tuple[str, int]]:
        return [("kafka", pid) for pid in self._cluster.pids()]

    def make_cold(self, topic: str) -> bool:
        return False


class Stratalog:
    """The local cluster below ``data``, controlled with the ``stratalog`` command."""

    name = "stratalog"

    def __init__(self, data: Path) -> None:
        self._data = data

    @property
    def bootstrap(self) -> str:
        return str(json.loads((self._data / "cluster.json").read_text())["bootstrap"])

    def run(self, *words: str) -> None:
        """Run one ``stratalog`` command on this cluster. Raises ``RuntimeError`` with its messages if it fails."""
        self.output(*words)

    def output(self, *words: str) -> str:
        """Return what ``run`` prints."""
        command = [sys.executable, "-m", "stratalog", *words, "--data", str(self._data)]
        done = subprocess.run(command, check=False, timeout=_COMMAND_TIMEOUT_S, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"stratalog {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def kill_broker(self) -> int:
        self.run("cluster", "kill", "broker-1")
        return 1

    def stop_broker(self) -> None:
        self.run("cluster", "stop", "broker-1")

    def start_broker(self) -> None:
        self.run("cluster", "restart", "broker-1")

    def memory_bytes(self) -> dict[str, int]:
        return _by_role(self.pids(), _memory_bytes)

    def cpu_s(self) -> dict[str, float]:
        return _by_role(self.pids(), cpu_s_of)

    def make_cold(self, topic: str) -> bool:
        self.run("tier", "offload", topic, "--wait", "--delete-hot", "--timeout", str(_COMMAND_TIMEOUT_S - 60))
        return True

    def pids(self) -> list[tuple[str, int]]:
        processes = json.loads((self._data / "cluster.json").read_text())["processes"]
        return [(process["role"], process["pid"]) for process in processes if process["pid"]]


_Amount = TypeVar("_Amount", int, float)


def _by_role(processes: Sequence[tuple[str, int]], amount: Callable[[psutil.Process], _Amount]) -> dict[str, _Amount]:
    """Added up per role; a process that has just ended adds nothing."""
    totals: dict[str, _Amount] = {}
    for role, pid in processes:
        try:
            used = amount(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
        totals[role] = totals[role] + used if role in totals else used
    return totals


def cpu_s_of(process: psutil.Process) -> float:
    """User and system time so far, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _memory_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


@contextmanager
def started(name: str, data: Path) -> Iterator[System]:
    """A cluster of that name (a key of ``DESCRIPTIONS``) below ``data``."""
    if name == "stratalog":
        system = Stratalog(data)
        system.run("cluster", "start")
        try:
            yield system
        finally:
            system.run("cluster", "stop")
        return
    extra = {"log.flush.interval.messages": "1"} if name == "kafka-fsync" else {}
    with KafkaCluster(data, extra=extra) as cluster:
        yield _Kafka(name, cluster)
