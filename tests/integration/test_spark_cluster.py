"""A standalone Spark cluster, a master and two workers as processes, whose workers have environments of their own.

``make spark-cluster`` runs it: a JVM each for master, workers, executors and drivers. An environment is named by a path that is
relative to the working directories of drivers and executors, so each finds its own there, as with an unpacked archive.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark
import pytest
import stratalog_demo
from unit.pipeline.conftest import ColdBucket

from stratalog.commands import job as job_module
from stratalog.exit_codes import ExitCode
from stratalog_core.batches.records import Record, build_batch

pytestmark = [
    pytest.mark.integration,
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.skipif("STRATALOG_SPARK_CLUSTER" not in os.environ, reason="run by `make spark-cluster`"),
]
SPARK_HOME = Path(pyspark.__file__).parent
PYTHON = "../../environment/bin/python"
FLIGHTS = 300


@dataclass(frozen=True, slots=True)
class Cluster:
    master: str
    root: Path

    def environment(self, name: str) -> Path:
        return self.root / name / "environment"

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a driver: Python with ``words``."""
        return self._driver(sys.executable, *words)

    def submit(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a driver by spark-submit, in client mode."""
        return self._driver(str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.master, *words)

    def _driver(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=self.root / "driver" / "a" / "b",
            env=_variables(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def _variables() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    return {
        **kept,
        "SPARK_HOME": str(SPARK_HOME),
        "PYSPARK_PYTHON": PYTHON,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_NO_DAEMONIZE": "1",
    }


def _make_environment(path: Path) -> Path:
    """Make an environment without packages of its own, which finds those of this one; return the file that makes it so."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(path)
    (packages,) = path.glob("lib/python3*/site-packages")
    link = packages / "packages.pth"
    link.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return link


@contextmanager
def _started(log: Path, *words: str) -> Iterator[str]:
    """Start a class of Spark; yields what it logs about its address or its registration."""
    with log.open("w") as output, subprocess.Popen(
        [str(SPARK_HOME / "bin" / "spark-class"), *words], env=_variables(), stdout=output, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 90
            while (
                found := re.search(r"Starting Spark master at (spark://\S+)|Successfully registered", log.read_text())
            ) is None:
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                assert process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.2)
            yield found[1] or ""
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("spark")
    (root / "driver" / "a" / "b").mkdir(parents=True)
    for name in ("driver", "worker-1", "worker-2"):
        _make_environment(root / name / "environment")
    with ExitStack() as stack:
        serving = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        master = stack.enter_context(_started(root / "master.log", "org.apache.spark.deploy.master.Master", *serving))
        for name in ("worker-1", "worker-2"):
            limits = ("--cores", "1", "--memory", "1g", "--work-dir", str(root / name))
            words = ("org.apache.spark.deploy.worker.Worker", *serving, *limits, master)
            stack.enter_context(_started(root / f"{name}.log", *words))
        yield Cluster(master, root)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> ColdBucket:
    bucket = ColdBucket(tmp_path_factory.mktemp("data") / "bucket")
    bucket.add_topic("delays", [[_delays(0, 150)], [_delays(150, 150)]], block_bytes=2000)
    bucket.add_topic("flights", [[_batches(0, 100), _batches(100, 50)], [_batches(150, 150)]], block_bytes=2000)
    return bucket


def _batches(first: int, count: int) -> list[bytes]:
    return [bytes(build_batch([_record(n) for n in range(at, at + 10)])) for at in range(first, first + count, 10)]


DEMO = """
import json, sys
from pyspark.sql import SparkSession
from stratalog_demo.spark_count import count_records, delays_by_carrier
session = SparkSession.builder.getOrCreate()
rows = [[row.carrier, row.flights, row.mean_delay_minutes] for row in delays_by_carrier(session, sys.argv[1], "delays")]
print(json.dumps([count_records(session, sys.argv[1], "delays"), rows, session.sparkContext.master]))
"""


def _delays(first: int, count: int) -> list[bytes]:
    """Flights as the demo's, by three carriers."""
    values = [
        b'{"carrier": "%s", "dep_delay": %d}' % ((b"AA", b"B6", b"UA")[n % 3], n % 3 + 1) for n in range(first, first + count)
    ]
    made = [Record(offset=at, timestamp_ms=1_700_000_000_000 + at, key=None, value=value) for at, value in enumerate(values)]
    return [bytes(build_batch(made[at : at + 10])) for at in range(0, count, 10)]


def _record(number: int) -> Record:
    offset = number if number < 150 else number - 150
    return Record(offset=offset, timestamp_ms=1_700_000_000_000 + number, key=b"k", value=b"%d" % number)


def _findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    assert done.stdout, done.stderr[-3000:]
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_doctor_looks_at_each_executor(cluster: Cluster, bucket: ColdBucket) -> None:
    words = ("-m", "stratalog", "doctor", "--spark", cluster.master, "--store", bucket.url, "--json")
    found = _findings(cluster.run(*words))
    assert {finding["verdict"] for finding in found.values()} == {"ok"}
    executors = [found[f"spark executor {number}"]["detail"] for number in (1, 2)]
    for name, detail in zip(("worker-1", "worker-2"), executors, strict=True):
        assert str(cluster.environment(name)) in detail
    assert PYTHON in found["spark driver"]["detail"]
    (link,) = cluster.environment("worker-2").glob("lib/python3*/site-packages/packages.pth")
    content = link.read_text()
    link.write_text("")
    try:
        done = cluster.run(*words)
    finally:
        link.write_text(content)
    broken = _findings(done)["spark executor 2"]
    assert (done.returncode, broken["verdict"]) == (ExitCode.FAILED, "fail")
    assert "no stratalog_pipeline.scan" in broken["detail"]
    assert "stratalog[executor]" in broken["remedy"]


def test_a_job_runs_on_the_cluster(cluster: Cluster, bucket: ColdBucket) -> None:
    done = cluster.run(
        "-m", "stratalog", "job", "audit", "--store", bucket.url, "flights", "--master", cluster.master, "--json"
    )
    assert done.returncode == ExitCode.OK, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert (report["sound"], report["totals"]["records"], report["totals"]["segments"]) == (True, FLIGHTS, 3)


def test_spark_submit_runs_the_module_of_the_jobs(cluster: Cluster, bucket: ColdBucket) -> None:
    done = cluster.submit(job_module.__file__, "audit", "--store", bucket.url, "flights", "--json")
    assert done.returncode == ExitCode.OK, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert (report["sound"], report["totals"]["records"]) == (True, FLIGHTS)
    refused = cluster.submit(job_module.__file__, "audit", "--store", bucket.url, "nothing", "--json")
    assert refused.returncode != ExitCode.OK
    # spark-submit sends what the program writes to stderr to stdout.
    assert [line for line in refused.stdout.splitlines() if "nothing" in line and line.startswith("stratalog: ")], (
        refused.stdout
    )
    assert "Traceback" not in refused.stdout + refused.stderr


def test_the_demos_query_runs_on_the_cluster(cluster: Cluster, bucket: ColdBucket, tmp_path: Path) -> None:
    """The step of `make demo` that counts, as a program that spark-submit starts, with its own module shipped along."""
    program = tmp_path / "count.py"
    program.write_text(DEMO)
    demo = tmp_path / "demo.zip"
    with zipfile.ZipFile(demo, "w") as archive:
        for path in Path(stratalog_demo.__file__).parent.glob("*.py"):
            archive.write(path, f"stratalog_demo/{path.name}")
    done = cluster.submit("--py-files", str(demo), str(program), bucket.url)
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr[-3000:]
    count, rows, master = json.loads(done.stdout.splitlines()[-1])
    assert (count, master) == (FLIGHTS, cluster.master)
    assert rows == [["AA", 100, 1.0], ["B6", 100, 2.0], ["UA", 100, 3.0]]
