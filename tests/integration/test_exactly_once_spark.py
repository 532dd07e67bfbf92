"""Drivers and tasks of a stream and of a replay are killed at random times; a plain consumer then reads each record once.

``make exactly-once`` kills at 100 points, ``make test`` at two.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Producer
from integration.committed_reads import committed_values
from integration.exactly_once_driver import PHASES, Spec
from integration.process_cluster import ProcessCluster

pytestmark = [pytest.mark.integration, pytest.mark.spark]
POINTS = int(os.environ.get("STRATALOG_EXACTLY_ONCE_POINTS", "2"))
RUNS_ALL = POINTS > 10
PARTITIONS = 2
RECORDS = 4000 if RUNS_ALL else 240
BATCH_OFFSETS = 120
ROWS_PER_S = 100.0
DELAY_S = 2.0
"""From the end of the last point, or the beginning of a phase, to the next point: as long as a batch takes, or less."""
ROUND_S = 1200.0
FAILURES_MAX = 3
"""Runs that may end by themselves with an error: a killed process may have been one of those that plan for the driver."""
SEED = 20261124


class Driver:
    """A running driver, in a process group of its own with its JVM and its workers."""

    def __init__(self, spec: Spec, log: Path) -> None:
        command = [sys.executable, "-m", "integration.exactly_once_driver", msgspec.json.encode(spec).decode()]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environ, text=True, start_new_session=True
            )
        self.phase = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.phase = line.strip() if line.strip() in PHASES else self.phase

    def has_begun(self, phase: str) -> bool:
        return self.phase != "" and PHASES.index(self.phase) >= PHASES.index(phase)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill the driver with all its tasks."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def wait(self) -> None:
        """Wait until the driver has ended by itself, or was killed."""
        wait_until(lambda: self.has_ended)
        self._reader.join()

    def kill_worker(self, choice: random.Random) -> bool:
        """Kill one of the processes that run tasks. Return False if there is none."""
        workers = [pid for pid in processes_of(self.process.pid) if "pyspark.daemon" in command_of(parent_of(pid))]
        if workers:
            try:
                os.kill(choice.choice(sorted(workers)), signal.SIGKILL)
            except ProcessLookupError:
                return False
        return bool(workers)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def processes_of(ancestor: int) -> list[int]:
    """Return the process ids of all descendants."""
    parents = {int(entry.name): parent_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


class Points:
    """The points at which something is killed, in turns in a stream and in a replay; each fifth is a driver."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.count = count
        self.random = random.Random(SEED)
        self.drivers = self.workers = 0

    def strike(self, driver: Driver) -> None:
        """Wait for the next point, and kill. Returns at once if the driver ends meanwhile."""
        number = self.count - self.left
        wait_until(lambda: driver.has_ended or driver.has_begun(PHASES[number % 2]))
        due = time.monotonic() + self.random.uniform(0.0, DELAY_S)
        wait_until(lambda: driver.has_ended or time.monotonic() > due)
        if driver.has_ended:
            return
        if number % 5 == 1:
            driver.kill()
            self.drivers += 1
            self.left -= 1
        elif driver.kill_worker(self.random):
            self.workers += 1
            self.left -= 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ROUND_S
    while not condition():
        assert time.monotonic() < deadline, "the driver hangs"
        time.sleep(0.02)


@pytest.mark.timeout(7200)
def test_streams_and_replays_that_are_killed_write_each_record_once(cluster: ProcessCluster, tmp_path: Path) -> None:
    source = cluster.new_topic(PARTITIONS)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    written = {number: [f"{number}-{place}" for place in range(RECORDS // PARTITIONS)] for number in range(PARTITIONS)}
    for number, values in written.items():
        for value in values:
            producer.produce(source, value, partition=number)
    assert producer.flush(60) == 0
    cluster.run("tier", "offload", source, "--wait")
    points = Points(POINTS)
    while points.left:
        copies = copied_under_kills(cluster, source, points, tmp_path)
        for copy in copies:
            for number, values in written.items():
                assert committed_values(cluster.bootstrap, copy, number) == values, f"{copy}-{number}"
    print(f"killed {points.drivers} drivers and {points.workers} workers")


def copied_under_kills(cluster: ProcessCluster, source: str, points: Points, tmp_path: Path) -> tuple[str, str]:
    """Copy the source by a stream and by a replay, and return both copies."""
    copies = cluster.new_topic(PARTITIONS), cluster.new_topic(PARTITIONS)
    work = tmp_path / copies[0]
    work.mkdir()
    spec = Spec(
        bootstrap=cluster.bootstrap, store=str(cluster.data / "store"), source=source, by_stream=copies[0], by_replay=copies[1],
        work=str(work), batch_offsets=BATCH_OFFSETS, rows_per_s=ROWS_PER_S,
    )  # fmt: skip
    failures = 0
    while failures <= FAILURES_MAX:
        driver = Driver(spec, work / "log")
        try:
            while points.left and not driver.has_ended:
                points.strike(driver)
            driver.wait()
        finally:
            if not driver.has_ended:
                driver.kill()
        if driver.process.returncode == 0:
            return copies
        failures += driver.process.returncode != -signal.SIGKILL
    raise AssertionError(f"{failures} runs failed: {(work / 'log').read_text()[-4000:]}")
