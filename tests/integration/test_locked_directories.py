"""A second start on a directory that is in use ends with an error; the first process continues and loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.process_cluster import ProcessCluster

from stratalog.exit_codes import ExitCode

pytestmark = pytest.mark.integration
TIMEOUT_S = 90
COPIES = 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    cluster = ProcessCluster(tmp_path_factory.mktemp("locked") / "data")
    cluster.run("cluster", "start", "--metadata", "1", "--bookies", "1", "--brokers", "1", "--tiering", "0")
    yield cluster
    cluster.run("cluster", "stop")


def _start_again(cluster: ProcessCluster, name: str, listen: str | None) -> subprocess.CompletedProcess[str]:
    """Start a process of ``cluster`` a second time, with its own configuration or another port, and wait for its end."""
    role, config = name.partition("-")[0], cluster.data / "config" / f"{name}.toml"
    environ = {**os.environ, **({f"STRATALOG_{role.upper()}_LISTEN": listen} if listen else {})}
    command = [sys.executable, "-m", "stratalog", role, "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environ)


@pytest.mark.parametrize("listen", [None, "127.0.0.1:0"], ids=["same port", "another port"])
@pytest.mark.parametrize("name", ["metadata-1", "bookie-1"])
def test_a_second_start_leaves_the_first_and_its_data_alone(cluster: ProcessCluster, name: str, listen: str | None) -> None:
    topic = cluster.new_topic(copies=COPIES)
    cluster.run("produce", topic, "--value", "before")
    (pid,) = [process["pid"] for process in cluster.processes(name.partition("-")[0])]

    second = _start_again(cluster, name, listen)
    assert second.returncode == ExitCode.CONFLICT, second.stderr
    assert f"{cluster.data / name} is in use by pid {pid}" in second.stderr
    assert "Traceback" not in second.stderr

    cluster.run("produce", topic, "--value", "after")
    cluster.kill(name)
    cluster.restart(name)
    cluster.run("produce", topic, "--value", "restarted")
    assert cluster.run("consume", topic, "--count", "3").split() == ["before", "after", "restarted"]


def test_a_taken_port_ends_a_start_before_it_reads_its_disk(cluster: ProcessCluster, tmp_path: Path) -> None:
    (bookie,) = cluster.processes("bookie")
    config = tmp_path / "bookie.toml"
    text = (cluster.data / "config" / "bookie-1.toml").read_text()
    config.write_text(text.replace(str(cluster.data / "bookie-1"), str(tmp_path / "disk")).replace('"bookie-1"', '"bookie-2"'))
    command = [sys.executable, "-m", "stratalog", "bookie", "--config", str(config)]
    environ = {**os.environ, "STRATALOG_HTTP_LISTEN": "off"}
    second = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environ)
    assert second.returncode == ExitCode.CONFLICT, second.stderr
    assert f"{bookie['address']} is in use by another process" in second.stderr
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["lock"]
