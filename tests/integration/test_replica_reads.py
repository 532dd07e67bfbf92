"""Java's consumer reads history from the replica in its rack, and goes on from the owner when that dies (KIP-392)."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Final

import pytest
from integration.compatibility import READS, recorded
from integration.process_cluster import ProcessCluster
from integration.replica_reads import OWNER, REPLICA, VALUES, create_topic, offload_and_restart, rack, run_fetches

from stratalog_loadgen.java_tools import class_path

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("java_tools")]

SOURCE: Final = Path(__file__).parent / "java" / "ReplicaReads.java"
FIRST: Final = len(VALUES) // 2
"""Records that are read before the replica is killed."""
HOT: Final = ("newer 1", "newer 2")
_TIMEOUT_S: Final = 120.0


@contextmanager
def java_consumer(cluster: ProcessCluster, topic: str) -> Iterator[subprocess.Popen[str]]:
    """A consumer in the replica's rack, which waits for a line of input after ``FIRST`` records."""
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
    arguments = [cluster.bootstrap, topic, rack(REPLICA), str(FIRST), str(len(VALUES) + len(HOT))]
    command = ["java", *options, "-cp", class_path(), str(SOURCE), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        overdue = threading.Timer(_TIMEOUT_S, process.kill)
        overdue.start()
        try:
            yield process
        finally:
            overdue.cancel()
            process.kill()


def metric(cluster: ProcessCluster, broker_id: int, name: str) -> float:
    (address,) = [str(each["http"]) for each in cluster.processes("broker") if each["name"] == f"broker-{broker_id}"]
    host, _, port = address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    (line,) = [line for line in page.splitlines() if line.startswith(name)]
    return float(line.split()[-1])


def until_more(cluster: ProcessCluster, broker_id: int, name: str, before: float) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while metric(cluster, broker_id, name) <= before:
        assert time.monotonic() < deadline, f"{name} of broker {broker_id} stays at {before}"
        time.sleep(0.1)


def check_fetches(cluster: ProcessCluster, topic: str) -> None:
    """Wait until each answer is a recorded one: a replica refuses while the metadata quorum is too slow for it."""
    expected = {pair for of_cluster in recorded().values() for pair in of_cluster[READS].items()}
    deadline = time.monotonic() + _TIMEOUT_S
    while unexpected := sorted(run_fetches(cluster.bootstrap, topic).items() - expected):
        assert time.monotonic() < deadline, f"run: make compatibility; {unexpected}"


def test_history_is_read_once_and_in_order_although_the_replica_dies(cluster: ProcessCluster) -> None:
    topic = cluster.new_group()
    create_topic(cluster.bootstrap, topic)
    try:
        offload_and_restart(cluster, topic)
        check_fetches(cluster, topic)
        cluster.fill(topic, *HOT)
        served_before = metric(cluster, REPLICA, "stratalog_broker_replica_out_bytes_total")
        with java_consumer(cluster, topic) as consumer:
            assert consumer.stdin is not None
            assert consumer.stdout is not None
            lines = [consumer.stdout.readline() for _ in range(FIRST)]
            # Metrics are up to a second old.
            until_more(cluster, REPLICA, "stratalog_broker_replica_out_bytes_total", served_before)
            until_more(cluster, OWNER, "stratalog_broker_replica_redirects_total", 0)
            cluster.kill(f"broker-{REPLICA}")
            consumer.stdin.write("\n")
            consumer.stdin.flush()
            lines += consumer.stdout.readlines()
        assert [line.rstrip("\n") for line in lines] == [f"{place}\t{value}" for place, value in enumerate((*VALUES, *HOT))]
    finally:
        cluster.restart(f"broker-{OWNER}", f"broker-{REPLICA}")
