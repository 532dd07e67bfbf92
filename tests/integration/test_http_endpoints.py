"""Metrics and health of every role over HTTP, on a real cluster of processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from integration.process_cluster import ProcessCluster
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.integration
_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A cluster whose processes tests may stop."""
    running = ProcessCluster(tmp_path_factory.mktemp("http"))
    running.run("cluster", "start", "--metadata", "1", "--bookies", "1", "--brokers", "1", "--tiering", "1")
    try:
        yield running
    finally:
        running.run("cluster", "stop")


def _get(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Return status and body; status 0 if there is no answer."""
    host, _, port = address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, HTTPException):
        return 0, ""
    finally:
        connection.close()


def _address(cluster: ProcessCluster, role: str) -> str:
    (process,) = cluster.processes(role)
    return str(process["http"])


def _pid(cluster: ProcessCluster, role: str) -> int:
    (process,) = cluster.processes(role)
    return int(process["pid"])


def _until_status(address: str, path: str, status: int, expected: str = "") -> str:
    """Return the first answer with this status, and with this body if one is given."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        found, body = _get(address, path)
        if found == status and body == (expected or body):
            return body
        time.sleep(0.02)
    pytest.fail(f"{path} at {address} never answered {status} {expected}")


def _metrics(address: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    status, body = _get(address, "/metrics")
    assert status == 200
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.mark.parametrize("role", ["metadata", "bookie", "broker", "tiering"])
def test_every_role_answers_its_three_paths(own_cluster: ProcessCluster, role: str) -> None:
    address = _address(own_cluster, role)
    assert _get(address, "/healthz") == (200, "alive\n")
    assert role.partition("ing")[0] in _until_status(address, "/readyz", 200)
    deadline = time.monotonic() + _TIMEOUT_S
    while not (metrics := _metrics(address))["stratalog_process_event_loop_lag_seconds_count"][()]:
        assert time.monotonic() < deadline, "the lag of the event loop is never measured"
        time.sleep(0.1)
    assert metrics["process_resident_memory_bytes"][()] > 0
    assert _get(address, "/metrics", "HEAD") == (200, "")
    assert _get(address, "/metrics", "POST")[0] == 405


def test_metrics_show_a_record_on_its_way(own_cluster: ProcessCluster) -> None:
    """Checks every role: producer's request, bookie's disk, metadata quorum, and the tiering worker that sees the record."""
    own_cluster.run("topic", "create", "followed", "--partitions", "1")
    own_cluster.run("produce", "followed", "--value", "hello")
    wanted = [
        ("broker", "stratalog_broker_requests_total", (("api", "Produce"),)),
        ("bookie", "stratalog_bookie_disk_group_commit_seconds_count", (("disk", "0"),)),
        ("metadata", "stratalog_metadata_is_leader", ()),
        ("metadata", "stratalog_metadata_records", (("kind", "topic"),)),
        ("tiering", "stratalog_tiering_sessions_total", ()),
    ]
    deadline = time.monotonic() + _TIMEOUT_S
    while wanted and time.monotonic() < deadline:
        # Answers are up to a second old.
        found = {role: _metrics(_address(own_cluster, role)) for role, _, _ in wanted}
        wanted = [(role, name, labels) for role, name, labels in wanted if not found[role].get(name, {}).get(labels)]
        time.sleep(0.1)
    assert wanted == []
    assert _metrics(_address(own_cluster, "metadata"))["stratalog_metadata_apply_lag_entries"][()] >= 0


def test_cluster_status_names_the_addresses(own_cluster: ProcessCluster) -> None:
    rows = {row["role"]: row["http"] for row in own_cluster.json("cluster", "status")["processes"]}
    assert rows["broker"] == _address(own_cluster, "broker")
    assert rows["broker"] in own_cluster.run("cluster", "status")


def test_a_bookie_that_recovers_is_alive_and_not_ready(own_cluster: ProcessCluster) -> None:
    """It cannot register while the quorum is stopped, so it stays at that point of its start as long as needed."""
    address = _address(own_cluster, "bookie")
    _until_status(address, "/readyz", 200)
    metadata = _pid(own_cluster, "metadata")
    os.kill(metadata, signal.SIGSTOP)
    try:
        own_cluster.kill("bookie-1")
        restarting = threading.Thread(target=own_cluster.run, args=("cluster", "restart", "bookie-1"))
        restarting.start()
        assert _until_status(address, "/readyz", 503) == "starting\n"
        assert _get(address, "/healthz")[0] == 200
    finally:
        os.kill(metadata, signal.SIGCONT)
    restarting.join()
    assert "bookie-1" in _until_status(address, "/readyz", 200)


def test_a_broker_that_stops_is_not_ready_until_it_is_back(own_cluster: ProcessCluster) -> None:
    address, pid = _address(own_cluster, "broker"), _pid(own_cluster, "broker")
    _until_status(address, "/readyz", 200)
    metadata = _pid(own_cluster, "metadata")
    # The broker cannot hand its partitions over while the quorum is stopped.
    os.kill(metadata, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGTERM)
        # Before its signal comes it may say that it has lost its session.
        _until_status(address, "/readyz", 503, "stopping\n")
        assert _get(address, "/healthz")[0] == 200
    finally:
        os.kill(metadata, signal.SIGCONT)
    own_cluster.restart("broker-1")
    _until_status(address, "/readyz", 200)


def test_a_role_without_its_quorum_is_not_ready(own_cluster: ProcessCluster) -> None:
    address, metadata = _address(own_cluster, "tiering"), _pid(own_cluster, "metadata")
    _until_status(address, "/readyz", 200)
    os.kill(metadata, signal.SIGSTOP)
    try:
        _until_status(address, "/readyz", 503)
        assert _get(address, "/healthz")[0] == 200
    finally:
        os.kill(metadata, signal.SIGCONT)
    _until_status(address, "/readyz", 200)


def test_slow_clients_and_scrapes_beside_load_change_nothing(own_cluster: ProcessCluster) -> None:
    address = _address(own_cluster, "broker")
    host, _, port = address.rpartition(":")
    own_cluster.run("topic", "create", "scraped", "--partitions", "50")
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": own_cluster.bootstrap, "enable.idempotence": True, "linger.ms": 5})
    slow = [socket.create_connection((host, int(port))) for _ in range(40)]
    try:
        for connection in slow:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        for number in range(2_000):
            producer.produce("scraped", value=b"x" * 500, on_delivery=lambda error, _: failed.append(error) if error else None)
            if number % 100 == 0:
                producer.poll(0.01)
                assert _get(address, "/metrics")[0] == 200
        assert producer.flush(_TIMEOUT_S) == 0
    finally:
        for connection in slow:
            connection.close()
    assert failed == []


def test_one_process_with_all_roles(tmp_path: Path) -> None:
    """``stratalog up``: one set of endpoints for all roles."""
    data, config = tmp_path / "up", tmp_path / "up.toml"
    config.write_text('[http]\nlisten = "127.0.0.1:0"\n')
    command = [sys.executable, "-m", "stratalog", "up", "--kafka", "127.0.0.1:0", "--data", str(data), "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as node:
        try:
            assert node.stdout is not None
            assert "serves Kafka clients at" in node.stdout.readline()
            (process,) = json.loads((data / "cluster.json").read_text())["processes"]
            detail = _until_status(process["http"], "/readyz", 200)
            assert [part.split()[0] for part in detail.split("; ")] == ["metadata", "bookie", "broker", "tiering"]
            assert _metrics(process["http"])["process_open_fds"][()] > 0
        finally:
            node.kill()
