"""Drivers and tasks of Spark are killed at random times; a plain reader then finds each record once, and nothing else.

Killed are streams, replays, batch writes by the Kafka sink, bulk writes and exports. ``make exactly-once`` kills at 100 points,
``make test`` at two. Commits that are interrupted at each of their steps: ``test_exactly_once.py``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from integration.committed_reads import committed_values
from integration.exactly_once_driver import BULK_PARTITIONS, DONE, JOBS, Spec
from integration.process_cluster import ProcessCluster

from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.export_journal import Journal

pytestmark = [pytest.mark.integration, pytest.mark.spark]
POINTS = int(os.environ.get("STRATALOG_EXACTLY_ONCE_POINTS", "2"))
RUNS_ALL = "STRATALOG_EXACTLY_ONCE_POINTS" in os.environ
PARTITIONS = 2
RECORDS = 960 if RUNS_ALL else 240
BATCH_OFFSETS = 120
ROWS_PER_S = 100.0
DELAY_S = 3.0
"""From the beginning of a job, or the last point, to the next point: jobs take longer, batches of a stream less."""
POINTS_PER_JOB = 2
"""Points at which a job is hit before its result is read and it begins anew."""
ROUND_S = 1200.0
LOOK_S = 0.02
TASKS_OF = "pyspark.daemon pyspark.worker"
"""In the command of the process that starts those of tasks. Others plan for the driver: without one its query fails."""
SEED = 20261124


class Driver:
    """A running driver, in a process group of its own with its JVM."""

    def __init__(self, spec: Spec, log: Path) -> None:
        command = [sys.executable, "-m", "integration.exactly_once_driver", msgspec.json.encode(spec).decode()]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environ, text=True, start_new_session=True
            )
        self.begun: list[str] = []
        """The jobs that have begun, and ``DONE``."""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                if line.strip() in (*JOBS, DONE):
                    self.begun.append(line.strip())

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill the driver. Its tasks end when they notice, as on a cluster, maybe beside those of the next driver."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def wait(self) -> None:
        """Wait until the driver has ended by itself, or was killed."""
        wait_until(lambda: self.has_ended)
        self._reader.join()

    def kill_worker(self, choice: random.Random) -> bool:
        """Kill one of the processes that run tasks. Return False if there is none."""
        workers = [pid for pid in processes_of(self.process.pid) if TASKS_OF in command_of(parent_of(pid))]
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


class Point(NamedTuple):
    """When to kill what: ``delay_s`` after the last point or the beginning of the job."""

    job: str
    is_driver: bool
    delay_s: float


def points_of(count: int) -> list[Point]:
    """Return points in turns in each job. Each fifth kills a driver, each time in another job."""
    source, jobs = random.Random(SEED), list(JOBS)
    return [
        Point(jobs[(number + number // 5) % len(jobs)], number % 5 == 1, source.uniform(0.0, DELAY_S))
        for number in range(count)
    ]


@dataclass(slots=True)
class Kills:
    """The points that are left, and what was killed. A point that its job did not wait for is left for the next round."""

    left: list[Point]
    choice: random.Random
    drivers: int = 0
    workers: int = 0

    def next_round(self) -> list[Point]:
        """Return points for each job, in the order of jobs."""
        found: list[Point] = []
        for job in JOBS:
            found += [point for point in self.left if point.job == job][:POINTS_PER_JOB]
        return found

    def strike(self, driver: Driver, point: Point) -> None:
        """Wait for the point, and kill. Does nothing if the job or the driver ends before."""

        def is_over() -> bool:
            return driver.has_ended or (point.job in driver.begun and driver.begun[-1] != point.job)

        wait_until(lambda: is_over() or point.job in driver.begun)
        due = time.monotonic() + point.delay_s
        wait_until(lambda: is_over() or time.monotonic() > due)
        while not is_over():
            if point.is_driver:
                driver.kill()
                self.drivers += 1
            elif driver.kill_worker(self.choice):
                self.workers += 1
            else:
                time.sleep(LOOK_S)
                continue
            self.left.remove(point)
            return


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ROUND_S
    while not condition():
        assert time.monotonic() < deadline, "the driver hangs"
        time.sleep(LOOK_S)


@pytest.mark.timeout(7200)
def test_what_is_killed_writes_each_record_once(cluster: ProcessCluster, tmp_path: Path) -> None:
    source = cluster.new_topic(PARTITIONS)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "log_level": 0})
    written = {number: [f"{number}-{place}" for place in range(RECORDS // PARTITIONS)] for number in range(PARTITIONS)}
    for number, values in written.items():
        for value in values:
            producer.produce(source, value, partition=number)
    assert producer.flush(60) == 0
    cluster.run("tier", "offload", source, "--wait")
    kills = Kills(points_of(POINTS), random.Random(SEED))
    rounds = 0
    while kills.left:
        rounds += 1
        assert rounds <= 5 + POINTS, "jobs end before they are hit"
        points = kills.next_round()
        spec = new_spec(cluster, source, sorted({point.job for point in points}, key=list(JOBS).index), tmp_path / str(rounds))
        run_under_kills(spec, points, kills)
        check(spec, written)
    print(f"killed {kills.drivers} drivers and {kills.workers} workers in {rounds} rounds")


def new_spec(cluster: ProcessCluster, source: str, jobs: Sequence[str], work: Path) -> Spec:
    work.mkdir()
    topics = {job: cluster.new_topic(PARTITIONS) for job in jobs if job in ("stream", "replay", "batch")}
    others = {"bulk": f"{source}-bulk-{work.name}", "export": str(work / "exported")}
    return Spec(
        bootstrap=cluster.bootstrap, store=cluster.store,
        metadata=cluster.metadata, source=source, jobs=tuple(jobs),
        targets=topics | others, work=str(work), batch_offsets=BATCH_OFFSETS, rows=RECORDS, rows_per_s=ROWS_PER_S,
    )  # fmt: skip


def run_under_kills(spec: Spec, points: Sequence[Point], kills: Kills) -> None:
    """Start drivers until one has ended, and kill at the points. Only a run in which something was killed may fail."""
    left, log = list(points), Path(spec.work) / "log"
    while True:
        driver, before = Driver(spec, log), kills.workers
        try:
            while left and not driver.has_ended:
                kills.strike(driver, left.pop(0))
            driver.wait()
        finally:
            if not driver.has_ended:
                driver.kill()
        if driver.process.returncode == 0:
            return
        # A worker may be one that plans for the driver, or the fourth of a task: then the query fails.
        was_hit = driver.process.returncode == -signal.SIGKILL or kills.workers > before
        assert was_hit, f"a run in which nothing was killed failed: {log.read_text()[-4000:]}"


def check(spec: Spec, written: dict[int, list[str]]) -> None:
    """Fail unless each job has written everything once, in its order."""
    for job in spec.jobs:
        target = spec.targets[job]
        if job in ("stream", "replay"):
            assert values_of(spec, target, PARTITIONS) == written, f"{target} by the {job}"
        elif job == "batch":
            found = Counter(value for values in values_of(spec, target, PARTITIONS).values() for value in values)
            assert found == Counter(f"row-{number}" for number in range(spec.rows)), f"{target} by the {job}"
        elif job == "bulk":
            rows = {of: [f"row-{row}" for row in range(of, spec.rows, BULK_PARTITIONS)] for of in range(BULK_PARTITIONS)}
            assert values_of(spec, target, BULK_PARTITIONS) == rows, f"{target} by the {job}"
        else:
            assert exported_values(target) == written, f"{target} by the {job}"


def values_of(spec: Spec, topic: str, partitions: int) -> dict[int, list[str]]:
    return {number: committed_values(spec.bootstrap, topic, number) for number in range(partitions)}


def exported_values(target: str) -> dict[int, list[str]]:
    """Return the values by partition, in order. Fail if there is a file that is not the export's, or an open upload."""
    with Bucket(target) as out:

        async def listed() -> tuple[set[str], int]:
            keys = {info.key async for info in out.store.list("")}
            return keys, len([upload async for upload in out.store.list_uploads()])

        journal = Journal(out)
        assert (journal.finished_runs(), journal.unfinished()) == ([1], None)
        files = journal.written(1)
        keys, uploads = out.run(listed())
    assert {key for key in keys if not key.startswith("_stratalog/")} == {file.key for file in files}
    assert uploads == 0
    values: dict[int, list[str]] = {}
    for file in sorted(files, key=lambda each: (each.partition, each.first)):
        found = pq.read_table(Path(target) / file.key, partitioning=None)
        assert found["offset"].to_pylist() == list(range(file.first, file.end))
        values.setdefault(file.partition, []).extend(value.decode() for value in found["value"].to_pylist())
    return values
