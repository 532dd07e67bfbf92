"""The containers' commands run as processes: the services of docker-compose.yml, with their own environment, on this machine.

Host names become free loopback ports and container paths become a temporary directory; nothing else is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Producer

from stratalog.local.ports import free_ports
from stratalog.local.readiness import BrokerProbe, wait_until

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
ROLES = {"metadata": "metadata", "bookies": "bookie", "broker": "broker", "tiering": "tiering"}
_ADDRESS = re.compile(r"\b((?:metadata|bookie)-\d):(\d+)|0\.0\.0\.0:(\d+)")


class _Composition:
    """Environments of the services, moved to this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        self.services = {name: service for name, service in services.items() if self._folder(service) in ROLES}
        self._ports: dict[str, int] = {}

    def _folder(self, service: dict[str, Any]) -> str:
        return str(service.get("build", {}).get("dockerfile", "")).split("/")[0]

    def command(self, name: str) -> list[str]:
        return [sys.executable, "-m", "stratalog", ROLES[self._folder(self.services[name])]]

    def environment(self, name: str) -> dict[str, str]:
        moved = {key: self._moved(name, str(value)) for key, value in self.services[name]["environment"].items()}
        if "STRATALOG_BROKER_LISTEN" in moved:
            host, port = moved["STRATALOG_BROKER_LISTEN"].rsplit(":", 1)
            moved |= {"STRATALOG_BROKER_ADVERTISED_HOST": host, "STRATALOG_BROKER_ADVERTISED_PORT": port}
        return {**moved, "STRATALOG_NODE_STORE": str(self._directory / "store")}

    def _moved(self, name: str, value: str) -> str:
        value = _ADDRESS.sub(lambda found: self._address(found[1] or name), value)
        return value.replace("/var/lib/stratalog", str(self._directory / name))

    def _address(self, name: str) -> str:
        if name not in self._ports:
            (self._ports[name],) = free_ports(1, taken=list(self._ports.values()))
        return f"127.0.0.1:{self._ports[name]}"

    def bootstrap(self) -> str:
        return ",".join(self._address(name) for name in self.services if name.startswith("broker-"))


@contextmanager
def _running(composition: _Composition, directory: Path) -> Iterator[None]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name in composition.services:
            with (directory / f"{name}.log").open("wb") as log:
                environment = {**os.environ, **composition.environment(name)}
                processes.append(subprocess.Popen(composition.command(name), env=environment, stdout=log, stderr=log))
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_the_services_make_a_cluster_that_takes_records(tmp_path: Path) -> None:
    composition = _Composition(tmp_path)
    with _running(composition, tmp_path):
        probe = BrokerProbe(composition.bootstrap())
        wait_until(lambda: len(probe.live()) == 2, f"no brokers, see {tmp_path}", timeout_s=60)
        producer = Producer({"bootstrap.servers": composition.bootstrap(), "acks": "all"})
        outcomes: list[object] = []
        producer.produce("first", b"record", on_delivery=lambda failure, _: outcomes.append(failure))
        assert producer.flush(30) == 0
        assert outcomes == [None]
