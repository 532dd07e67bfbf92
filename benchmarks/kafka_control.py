"""Apache Kafka as the control: brokers that are controllers too, by default three and RF 3, on loopback, from Maven's jars."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

from stratalog.local.ports import free_ports
from stratalog.local.readiness import wait_for_brokers
from stratalog_loadgen.java_tools import java, run_tool

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 30.0
GROUP_DELAY_MS = 500
"""How long a new group waits for more members: our default, set here, too; Kafka's is 3 s."""


class KafkaCluster:
    """A cluster below ``data``, which runs within the context. ``extra`` settings go to every broker, as ``flush.messages``.

    With ``has_racks`` broker 1 is in ``rack-1``, broker 2 in ``rack-2``, …
    """

    def __init__(
        self,
        data: Path,
        *,
        brokers: int = 3,
        heap: str = "1g",
        extra: Mapping[str, str] | None = None,
        has_racks: bool = False,
    ) -> None:
        self._data = data
        self._heap = heap
        self._extra = dict(extra or {})
        self._has_racks = has_racks
        ports = free_ports(2 * brokers)
        self._client_ports, self._controller_ports = ports[:brokers], ports[brokers:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._cluster_id = urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._client_ports)

    def __enter__(self) -> KafkaCluster:
        try:
            for number in range(1, len(self._client_ports) + 1):
                self._format(number)
                self._start(number)
            self._wait_until_serving()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def kill(self, number: int) -> None:
        """SIGKILL broker ``number`` (1, 2, …)."""
        self._processes[number].send_signal(signal.SIGKILL)
        self._processes[number].wait()

    def stop(self, number: int) -> None:
        """Stop broker ``number`` by a controlled shutdown; SIGKILL if it does not end."""
        self._end(self._processes[number], time.monotonic() + _STOP_TIMEOUT_S, terminate=True)

    def start(self, number: int) -> None:
        """Start a broker that was stopped or killed; returns when all serve."""
        self._start(number)
        self._wait_until_serving()

    def pids(self) -> list[int]:
        """Of the brokers that run."""
        return [process.pid for process in self._processes.values() if process.poll() is None]

    def _format(self, number: int) -> None:
        directory = self._data / f"kafka-{number}"
        directory.mkdir(parents=True)
        (directory / "server.properties").write_text(self._properties(number, directory))
        run_tool(
            "kafka.tools.StorageTool", "format", f"--cluster-id={self._cluster_id}", "-c", str(directory / "server.properties")
        )

    def _properties(self, number: int, directory: Path) -> str:
        voters = ",".join(f"{voter}@127.0.0.1:{port}" for voter, port in enumerate(self._controller_ports, 1))
        client, controller = self._client_ports[number - 1], self._controller_ports[number - 1]
        copies = str(min(3, len(self._client_ports)))
        settings = {
            "process.roles": "broker,controller",
            "node.id": str(number),
            "controller.quorum.voters": voters,
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{client}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(directory / "data"),
            "default.replication.factor": copies,
            "min.insync.replicas": "2" if copies == "3" else "1",
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": "2" if copies == "3" else "1",
            "group.initial.rebalance.delay.ms": str(GROUP_DELAY_MS),
            # Of a topic that is gone, not later than ours: a disk does not hold a minute of many cells.
            "log.segment.delete.delay.ms": "10000",
            **({"broker.rack": f"rack-{number}"} if self._has_racks else {}),
            **self._extra,
        }
        return "".join(f"{name}={value}\n" for name, value in settings.items())

    def _start(self, number: int) -> None:
        directory = self._data / f"kafka-{number}"
        command = java("kafka.Kafka", str(directory / "server.properties"), heap=self._heap)
        with (directory / "log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=dict(os.environ)
            )

    def _wait_until_serving(self) -> None:
        wait_for_brokers(self.bootstrap, self.bootstrap.split(","), lambda: None, timeout_s=_START_TIMEOUT_S)

    def _stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes.values():
            self._end(process, deadline)

    @staticmethod
    def _end(process: subprocess.Popen[bytes], deadline: float, *, terminate: bool = False) -> None:
        if terminate:
            process.terminate()
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
