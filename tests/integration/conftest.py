"""A real cluster of processes, started once for all integration tests with the command line, as a user starts one.

A test that breaks something must repair it before it ends: the cluster is shared.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from integration.process_cluster import ProcessCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG_LINES = 25
"""The last lines of each log that a failed test prints."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the ends of the shared cluster's logs to the report of a failed test: a rare failure cannot be looked at again."""
    report = yield
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(running, ProcessCluster):
        for log in sorted((running.data / "logs").glob("*.log")):
            end = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            report.sections.append((f"end of {log.name}", "\n".join(end)))
    return report


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A cluster of three metadata nodes, three bookies, two brokers, one tiering worker."""
    running = ProcessCluster(tmp_path_factory.mktemp("cluster"))
    running.run("cluster", "start", "--metadata", "3", "--bookies", "3", "--brokers", "2", "--tiering", "1")
    try:
        yield running
    finally:
        running.run("cluster", "stop")


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """A local session; a module may set ``SPARK_MASTER``."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    master = getattr(request.module, "SPARK_MASTER", "local[2]")
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def _program(name: str, remedy: str) -> str:
    return shutil.which(name) or _missing(f"no {name}: {remedy}")


def _missing(complaint: str) -> NoReturn:
    """Fail in CI, which must have the program; elsewhere skip the test."""
    if os.environ.get("CI"):
        pytest.fail(complaint)
    pytest.skip(complaint)


@pytest.fixture(scope="session")
def compose_loader() -> str:
    """Return the path of Compose's own file check."""
    path = os.environ.get("STRATALOG_COMPOSE", "")
    return (
        path if Path(path).is_file() else _missing("STRATALOG_COMPOSE names no program: run `make tools`, and tests by `make`")
    )


@pytest.fixture(scope="session")
def kcat() -> str:
    """Return the path of kcat."""
    return _program("kcat", "apt-get install kcat")


@pytest.fixture(scope="session")
def java_tools() -> None:
    """Require the programs that run Apache Kafka's own tools."""
    _program("java", "install Java 17 or newer")
    _program("mvn", "apt-get install maven")
