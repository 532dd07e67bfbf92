"""The two systems under comparison behind one border: start, serve, lose a broker, stop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.kafka_control import KafkaCluster

_COMMAND_TIMEOUT_S = 600


class System(Protocol):
    """A running cluster with three copies of everything."""

    @property
    def name(self) -> str: ...

    @property
    def bootstrap(self) -> str: ...

    def kill_broker(self) -> int:
        """SIGKILL one broker; its id."""
        ...

    def resident_bytes(self) -> int:
        """Resident memory of all its processes."""
        ...

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that its processes have used so far, by role."""
        ...

    def make_cold(self, topic: str) -> bool:
        """Move all of ``topic`` to the object store and drop the hot copies; false if the system has no such thing."""
        ...


def create_topic(system: System, topic: str, partitions: int) -> None:
    """Three copies, acknowledged by two."""
    client = AdminClient({"bootstrap.servers": system.bootstrap, "log_level": 0})
    settings = {"min.insync.replicas": "2"}
    new = NewTopic(topic, num_partitions=partitions, replication_factor=3, config=settings)
    for future in client.create_topics([new]).values():
        future.result(60)


class _Kafka:
    """Apache Kafka; it acknowledges from the page cache, as it does by default."""

    name = "kafka"

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster

    @property
    def bootstrap(self) -> str:
        return self._cluster.bootstrap

    def kill_broker(self) -> int:
        self._cluster.kill(1)
        return 1

    def resident_bytes(self) -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in self._cluster.pids())

    def cpu_s(self) -> dict[str, float]:
        return {"kafka": sum(_cpu_s(pid) for pid in self._cluster.pids())}

    def make_cold(self, topic: str) -> bool:
        return False


class _Stratalog:
    """A local cluster of processes; every acknowledgement is on two disks."""

    name = "stratalog"

    def __init__(self, data: Path) -> None:
        self._data = data

    @property
    def bootstrap(self) -> str:
        return str(json.loads((self._data / "cluster.json").read_text())["bootstrap"])

    def run(self, *words: str) -> None:
        command = [sys.executable, "-m", "stratalog", *words, "--data", str(self._data)]
        subprocess.run(command, check=True, timeout=_COMMAND_TIMEOUT_S, stderr=subprocess.DEVNULL)

    def kill_broker(self) -> int:
        self.run("cluster", "kill", "broker-1")
        return 1

    def resident_bytes(self) -> int:
        return sum(psutil.Process(pid).memory_info().rss for _, pid in self._pids())

    def cpu_s(self) -> dict[str, float]:
        used: dict[str, float] = {}
        for role, pid in self._pids():
            used[role] = used.get(role, 0.0) + _cpu_s(pid)
        return used

    def _pids(self) -> list[tuple[str, int]]:
        processes = json.loads((self._data / "cluster.json").read_text())["processes"]
        return [(process["role"], process["pid"]) for process in processes if process["pid"]]

    def make_cold(self, topic: str) -> bool:
        self.run("tier", "offload", topic, "--wait", "--delete-hot", "--timeout", "500")
        return True


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@contextmanager
def kafka(data: Path) -> Iterator[System]:
    """Three brokers that are controllers, too."""
    with KafkaCluster(data) as cluster:
        yield _Kafka(cluster)


@contextmanager
def stratalog(data: Path) -> Iterator[System]:
    """Three metadata nodes, three bookies, two brokers, one tiering worker."""
    system = _Stratalog(data)
    system.run("cluster", "start")
    try:
        yield system
    finally:
        system.run("cluster", "stop")
