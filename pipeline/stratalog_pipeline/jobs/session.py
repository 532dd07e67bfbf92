"""A job's Spark session, its progress, and the translation of Spark's traces to Stratalog's errors."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from py4j.protocol import Py4JJavaError
from pyspark import StatusTracker
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from stratalog_core.errors import Invalid, StratalogError, Unavailable
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.task_process import begin_task

PROGRESS_INTERVAL_S: Final = 0.3
EVENTS_TIMEOUT_MS: Final = 5_000
_NO_JAVA: Final = "JAVA_GATEWAY_EXITED"
_QUERY_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""They print the error of a query with its whole trace, as JSON."""
_groups = itertools.count(1)
"""Numbers of job groups. Spark keeps the finished jobs of a group, so each watched job needs a group of its own."""
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
OnProgress = Callable[[int, int], None]
"""Takes the number of finished tasks and the number of all tasks."""


@contextmanager
def job_session(name: str, master: str | None) -> Iterator[SparkSession]:
    """Yield a session for one job: that of spark-submit if there is one, otherwise a new one on ``master``.

    Only a session that is made here is stopped. Spark's log shows errors only: the job prints its own progress. Raises
    ``Unavailable`` if Spark does not start.
    """
    for logger in _QUERY_LOGGERS:
        PySparkLogger.getLogger(logger).disabled = True
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    # Without it Spark runs the first python3 on PATH, which may lack this environment's packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    builder = SparkSession.builder.appName(f"stratalog-{name}")
    with as_file(files("stratalog_pipeline.jobs") / "log4j2.properties") as log4j:
        if master is not None:
            builder = builder.master(master)
        local = {
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log4j.as_uri()}",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.session.timeZone": "UTC",
        }
        if master is not None and master.startswith("local"):
            local |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        for key, value in local.items():
            builder = builder.config(key, value)
        with translated_errors():
            session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def make_directory(url: str) -> None:
    """Create the directory of a file URL, to write into it as into a bucket; buckets must exist."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        Path(parts.path).mkdir(parents=True, exist_ok=True)


def run_tasks(
    spark: SparkSession,
    store: str,
    tasks: Sequence[_Task],
    work: Callable[[Bucket, _Task], _Result],
    on_progress: OnProgress = lambda done, total: None,
) -> list[_Result]:
    """Run ``work`` for each task on the executors, each with the bucket open, and return the results in the tasks' order.

    Tasks, results and ``work`` are pickled. Raises the error of a task that failed as often as Spark allows: four times, but
    once with a master such as ``local[*]``.
    """
    if not tasks:
        return []
    pickled = spark.sparkContext.parallelize([pickle.dumps(task) for task in tasks], len(tasks))
    with translated_errors(), watched(spark, on_progress, len(tasks)):
        return [pickle.loads(result) for result in pickled.mapPartitions(_on_executor(store, work)).collect()]


def _on_executor(store: str, work: Callable[[Bucket, _Task], _Result]) -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    def run(contents: Iterable[bytes]) -> Iterator[bytes]:
        begin_task()
        with Bucket(store) as bucket:
            for content in contents:
                yield pickle.dumps(work(bucket, pickle.loads(content)))

    return run


@contextmanager
def watched(spark: SparkSession, on_progress: OnProgress, total: int = 0) -> Iterator[None]:
    """Report the number of finished tasks while the job in the ``with`` block runs.

    ``total`` is the number of all tasks; 0: unknown until Spark has planned them, so the reported total grows with each stage.
    """
    context = spark.sparkContext
    group = f"stratalog-{next(_groups)}"
    ended = threading.Event()
    stages: dict[int, tuple[int, int]] = {}

    def report(*, is_over: bool = False) -> None:
        stages.update(_stages(context.statusTracker(), group))
        whole = total or sum(tasks for _, tasks in stages.values())
        on_progress(whole if is_over else min(whole, sum(finished for finished, _ in stages.values())), whole)

    def watch() -> None:
        while not ended.wait(PROGRESS_INTERVAL_S):
            report()

    context.setJobGroup(group, "stratalog", interruptOnCancel=True)
    watcher = threading.Thread(target=watch, name="stratalog-progress", daemon=True)
    on_progress(0, total)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        context.cancelJobGroup(group)
        raise
    finally:
        ended.set()
        watcher.join()
    _wait_for_events(spark)
    report(is_over=True)


def _wait_for_events(spark: SparkSession) -> None:
    """Wait up to ``EVENTS_TIMEOUT_MS`` until the status tracker has processed all events: it lags behind the stages."""
    with suppress(Py4JJavaError):  # Not processed in time: report what is known.
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(EVENTS_TIMEOUT_MS)


def _stages(tracker: StatusTracker, group: str) -> dict[int, tuple[int, int]]:
    """Return the finished and total tasks of each started stage. A stage whose output exists already never starts."""
    jobs = [info for job in tracker.getJobIdsForGroup(group) if (info := tracker.getJobInfo(job)) is not None]
    found = {stage: tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds}
    return {
        stage: (info.numCompletedTasks, info.numTasks)
        for stage, info in found.items()
        if info is not None and info.numActiveTasks + info.numCompletedTasks
    }


def _raised(text: str) -> StratalogError | None:
    """Return Stratalog's error in a trace; None if there is none."""
    for module, name, message in reversed(_OURS.findall(text)):
        # Everything that a task imports for the store is imported here, too.
        kind: Any = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, StratalogError):
            return kind(message)
    return None


_OURS: Final = re.compile(r"^(?:pyspark\.errors\S*: )?(stratalog_\w+(?:\.\w+)*)\.(\w+): (.+)$", re.MULTILINE)


_OF_DATA: Final = re.compile(r"\[[A-Z0-9_.]+\] .* SQLSTATE: 22\w{3}")
"""Spark's message about a value that an expression does not take, which is of SQL's class of data exceptions."""


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn a failure of Spark into the Stratalog error that a task raised, otherwise into ``Unavailable``.

    ``Invalid`` for a query that Spark refuses, and for a value that an expression of it does not take.
    """
    try:
        yield
    except (AnalysisException, ParseException) as wrong:
        # A query that cannot be planned: the source refuses it, or Spark does.
        raise _raised(str(wrong)) or Invalid(str(wrong).strip().splitlines()[0]) from wrong
    except PySparkException as failed:
        raise as_ours(str(failed)) from failed
    except Exception as failed:
        # Errors of the JVM that py4j does not translate.
        if type(failed).__module__.split(".")[0] != "py4j":
            raise
        raise as_ours(str(failed)) from failed


def as_ours(text: str) -> StratalogError:
    """Return the error that a trace of Spark is about."""
    raised = _raised(text)
    if raised is not None:
        return raised
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
    if _NO_JAVA in text:
        return Unavailable("Spark did not start, for the reason above: it needs Java 17 or newer, and a master that it knows")
    of_data = _OF_DATA.search(text)
    if of_data is not None:
        return Invalid(of_data[0])
    reason = next((line for line in lines if "Exception" in line or "Error" in line), lines[0] if lines else "no reason given")
    return Unavailable(f"Spark could not run the job: {reason}")
