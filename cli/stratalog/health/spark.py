"""Checks Spark for ``stratalog doctor --spark``: the driver's data source, and a task in every slot of every executor.

A task imports what a scan needs and reports what is missing. It is pickled by value, so that it runs where Stratalog is not
installed, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from stratalog.health.finding import Finding, fail, ok, warn
from stratalog_core.errors import StratalogError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_MIN: Final = (4, 2)
EXECUTORS_S_MAX: Final = 15.0
SETTLED_S: Final = 3.0
Report = dict[str, str]
"""Keys: ``host``, ``directory``, ``prefix``, ``python``, ``stratalog``; ``missing``, ``store``, ``cache`` say what is wrong."""
_INSTALL: Final = "install stratalog[executor], of the driver's version, into the environment that PYSPARK_PYTHON names there"


def check_spark(master: str, store: str | None) -> list[Finding]:
    """Check the driver and each executor of ``master``. ``store``: also whether executors can list the topics in it."""
    try:
        import pyspark
    except ModuleNotFoundError:
        return [fail("spark driver", "there is no pyspark", "pip install 'stratalog[spark]'")]
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < SPARK_MIN:
        return [fail("spark driver", f"pyspark is {pyspark.__version__}; the minimum is 4.2", "pip install 'stratalog[spark]'")]
    from stratalog_pipeline.jobs.session import job_session, translated_errors

    try:
        with job_session("doctor", master) as session, translated_errors():
            return [_check_source(session), *executor_findings(_run(session, store), store)]
    except StratalogError as failed:
        return [fail("spark", failed.message, "see the logs of the executors; their Python must have the driver's version")]


def _check_source(session: SparkSession) -> Finding:
    interpreter = os.environ.get("PYSPARK_DRIVER_PYTHON") or os.environ.get("PYSPARK_PYTHON", "python3")
    try:
        session.read.format("stratalog").option("store", "/").option("subscribe", "none").load()
    except Exception as unknown:
        if "DATA_SOURCE_NOT_FOUND" not in str(unknown):
            raise
        remedy = 'before the session starts: os.environ.setdefault("PYSPARK_PYTHON", sys.executable)'
        return fail("spark driver", f"{interpreter} does not know the format stratalog", remedy)
    return ok("spark driver", f"{interpreter} knows the format stratalog")


def _run(session: SparkSession, store: str | None) -> list[Report]:
    """Run a task in every slot at the same time."""
    context = session.sparkContext
    tracker = context._jsc.sc().statusTracker()
    deadline, settled_at, count = time.monotonic() + EXECUTORS_S_MAX, time.monotonic() + SETTLED_S, 0
    while time.monotonic() < min(deadline, settled_at):
        if len(tracker.getExecutorInfos()) != count:
            count, settled_at = len(tracker.getExecutorInfos()), time.monotonic() + SETTLED_S
        time.sleep(0.2)
    slots = context.defaultParallelism
    return context.parallelize(range(slots), slots).barrier().mapPartitions(_task(store)).collect()


def _task(store: str | None) -> Callable[[Iterable[int]], Iterator[Report]]:
    """Return the task. It is defined here so that Spark pickles its code, and it imports all that it uses."""

    def check(_: Iterable[int]) -> Iterator[Report]:
        import importlib
        import importlib.metadata
        import os
        import platform
        import socket
        import sys

        missing: list[str] = []
        for name in ("stratalog_pipeline.scan", "numba", "pyarrow", "confluent_kafka"):
            try:
                importlib.import_module(name)
            except Exception as error:
                missing.append(f"{name} ({error})")
        found = {
            "host": socket.gethostname(), "directory": os.getcwd(), "prefix": sys.prefix,
            "python": platform.python_version(), "missing": "; ".join(missing),
        }  # fmt: skip
        if not missing:
            found["stratalog"] = importlib.metadata.version("stratalog")
            from stratalog_pipeline.arrow import kernels

            cache = os.environ.get("NUMBA_CACHE_DIR") or os.path.dirname(kernels.__file__)
            found["cache"] = "" if os.access(cache, os.W_OK) else cache
            if store is not None:
                from stratalog_pipeline.bucket import Bucket

                try:
                    with Bucket(store) as bucket:
                        bucket.topics()
                except Exception as error:
                    found["store"] = f"{type(error).__name__}: {error}"
        yield found

    return check


def executor_findings(reports: Iterable[Report], store: str | None) -> Iterator[Finding]:
    """Yield a finding for each executor, which is known by its host and working directory. Pure."""
    executors = {(report["host"], report["directory"]): report for report in reports}
    for number, (_, report) in enumerate(sorted(executors.items()), 1):
        name = f"spark executor {number}"
        if report["missing"]:
            yield fail(name, f"{report['host']}, {report['prefix']}: no {report['missing']}", _INSTALL)
        elif report["stratalog"] != version("stratalog"):
            detail = f"{report['host']}, {report['prefix']}: stratalog {report['stratalog']}, here {version('stratalog')}"
            yield fail(name, detail, _INSTALL)
        elif report.get("store"):
            remedy = "give executors the credentials and a URL that they reach: spark.executorEnv.AWS_…"
            yield fail(name, f"{report['host']}: cannot read {store}: {report['store']}", remedy)
        elif report["cache"]:
            remedy = "set spark.executorEnv.NUMBA_CACHE_DIR to a directory that can be written"
            yield warn(name, f"{report['host']}: {report['cache']} is read-only, so each task compiles for seconds", remedy)
        else:
            yield ok(name, f"{report['host']}, {report['prefix']}, Python {report['python']}, stratalog {report['stratalog']}")
