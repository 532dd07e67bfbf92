"""A task of the exactly-once sink is killed before and after each call to the brokers; a plain consumer sees each row once.

No Spark here: ``test_exactly_once_spark.py`` kills whole streams and replays.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from benchmarks.kafka_control import KafkaCluster
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from integration.committed_reads import committed_values
from integration.process_cluster import ProcessCluster

from stratalog_core.errors import Conflict, Fenced, Unavailable
from stratalog_core.system import SystemClock
from stratalog_pipeline import sink_markers, sink_transactions
from stratalog_pipeline.kafka_sink import WriteOptions, parse_write_options
from stratalog_pipeline.sink_markers import Markers, Unit
from stratalog_pipeline.sink_transactions import send_once

pytestmark = pytest.mark.integration
RUNS_ALL = "STRATALOG_EXACTLY_ONCE_POINTS" in os.environ
ROWS = 300
STEPS = ("init_transactions", "begin_transaction", "produce", "send_offsets_to_transaction", "commit_transaction")
POINTS = [(step, moment) for step in STEPS for moment in ("before", "after")]
TASKS = f"""
import os, signal, sys
import pyarrow as pa
from confluent_kafka import Producer
from stratalog_pipeline import sink_transactions
from stratalog_pipeline.kafka_sink import parse_write_options
from stratalog_pipeline.sink_markers import Unit

bootstrap, topic = sys.argv[1:]
options = parse_write_options({{"kafka.bootstrap.servers": bootstrap, "topic": topic}})

def killed(name, moment):
    def call(self, *arguments, **named):
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        getattr(Producer, name)(self, *arguments, **named)
        if name == "produce":
            self.flush(30)
        os.kill(os.getpid(), signal.SIGKILL)
    return call

def rows_of(number):
    return pa.RecordBatch.from_pydict({{"value": pa.array([f"{{number}}-{{row}}" for row in range({ROWS})], pa.string())}})

rows = [rows_of(number) for number in range({len(POINTS)})]
rows[0].to_pylist()
for number, (step, moment) in enumerate({POINTS}):
    # This process has no client, so that it can fork.
    child = os.fork()
    if child == 0:
        sink_transactions.Producer = type("Killed", (Producer,), {{step: killed(step, moment)}})
        sink_transactions.send_once([rows[number]], options, Unit(write=topic, batch=0, task=number, run="first"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"{{moment}} {{step}}"
"""


def rows_of(batch: int, rows: Iterable[int] = range(ROWS)) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array([f"{batch}-{row}" for row in rows], pa.string())})


def options_of(bootstrap: str, topic: str, **more: str) -> WriteOptions:
    return parse_write_options({"kafka.bootstrap.servers": bootstrap, "topic": topic, **more})


def kill_at_each_step(bootstrap: str, topic: str) -> None:
    """Kill a task at each point, then run all tasks again, at once. Fail unless each row can be read once."""
    command = [sys.executable, "-c", TASKS, bootstrap, topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    options, unit = options_of(bootstrap, topic), Unit(write=topic, batch=0, task=0, run="second")
    numbers = range(len(POINTS))
    with ThreadPoolExecutor(len(POINTS)) as pool:
        sent = [pool.submit(send_once, [rows_of(number)], options, replace(unit, task=number)) for number in numbers]
    assert [one.result() for one in sent] == [ROWS] * len(POINTS)
    Markers(options).check_compared(unit)
    expected = {f"{number}-{row}" for number in range(len(POINTS)) for row in range(ROWS)}
    read = committed_values(bootstrap, topic)
    assert (len(read), set(read)) == (len(expected), expected)


@pytest.mark.timeout(300)
def test_a_task_that_is_killed_at_any_step_is_written_once(cluster: ProcessCluster) -> None:
    kill_at_each_step(cluster.bootstrap, cluster.new_topic())


@pytest.mark.parametrize("learns", ["at its end", "while it sends"])
def test_of_two_attempts_at_once_the_later_one_writes(cluster: ProcessCluster, learns: str) -> None:
    topic = cluster.new_topic()
    options, unit = options_of(cluster.bootstrap, topic), Unit(write=topic, batch=0, task=0)
    is_writing, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def slow_rows() -> Iterator[pa.RecordBatch]:
        yield rows_of(0, range(100))
        is_writing.set()
        assert may_end.wait(60)
        yield rows_of(0, range(100, ROWS))
        while learns == "while it sends":
            yield rows_of(1, range(1))
            assert not has_ended.wait(0.01)

    failures: list[Exception] = []

    def earlier() -> None:
        try:
            send_once(slow_rows(), options, unit)
        except Exception as failure:
            failures.append(failure)

    attempt = threading.Thread(target=earlier)
    attempt.start()
    assert is_writing.wait(60)
    assert send_once([rows_of(0)], options, unit) == ROWS
    may_end.set()
    attempt.join(60)
    has_ended.set()
    assert [type(failure) for failure in failures] == [Fenced], failures
    assert send_once([rows_of(0)], options, unit) == ROWS, "a third attempt finds the marker"
    assert committed_values(cluster.bootstrap, topic) == [f"0-{row}" for row in range(ROWS)]


class LostAnswer(Producer):
    """The commit is decided, and its answer is lost."""

    is_aborted = False

    def commit_transaction(self, *arguments: Any) -> None:
        if self.is_aborted:
            super().abort_transaction(*arguments)
        else:
            super().commit_transaction(*arguments)
        raise KafkaException(KafkaError(KafkaError._TRANSPORT, "the answer is lost"))


class Aborted(LostAnswer):
    is_aborted = True


def test_a_commit_without_an_answer_is_found_out(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = cluster.new_topic()
    options = options_of(cluster.bootstrap, topic)
    monkeypatch.setattr(sink_transactions, "Producer", LostAnswer)
    assert send_once([rows_of(0)], options, Unit(write=topic, batch=0, task=0)) == ROWS
    monkeypatch.setattr(sink_transactions, "Producer", Aborted)
    with pytest.raises(Unavailable, match="aborted"):
        send_once([rows_of(1)], options, Unit(write=topic, batch=1, task=0))
    monkeypatch.undo()
    assert send_once([rows_of(1)], options, Unit(write=topic, batch=1, task=0)) == ROWS
    assert len(committed_values(cluster.bootstrap, topic)) == 2 * ROWS


def test_rows_that_differ_from_those_that_are_written_are_refused(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic()
    strict = options_of(cluster.bootstrap, topic)
    unit = Unit(write=topic, batch=0, task=1)
    assert send_once([rows_of(0, range(0))], strict, unit) == 0
    assert Markers(strict).read(unit) is None, "a task without rows needs no marker"
    assert send_once([rows_of(0)], strict, unit) == ROWS
    assert send_once([rows_of(0, reversed(range(ROWS)))], strict, unit) == ROWS, "a shuffle may change their order"
    with pytest.raises(Conflict, match=r"has 299 rows that are not the 300 .*repartition"):
        send_once([rows_of(0, range(1, ROWS))], strict, unit)
    with pytest.raises(Conflict, match="has 300 rows that are not the 300"):
        send_once([rows_of(0, range(1, ROWS + 1))], strict, unit)
    with pytest.raises(Conflict, match="has 0 rows that are not the 300"):
        send_once([], strict, unit)
    trusting = options_of(cluster.bootstrap, topic, markers="trusted")
    assert send_once([rows_of(0, range(1, ROWS))], trusting, unit) == ROWS
    assert send_once([], trusting, unit) == 0
    assert len(committed_values(cluster.bootstrap, topic)) == ROWS


def test_a_run_that_splits_a_batch_into_other_tasks_writes_nothing(
    cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = cluster.new_topic()
    strict, first = options_of(cluster.bootstrap, topic), Unit(write=topic, batch=0, task=1, run="first")
    send_once([rows_of(0, range(150, ROWS))], strict, first)
    second = replace(first, run="second", task=0)
    # Nothing compares the rows of task 1: the second run has one task.
    monkeypatch.setattr(sink_markers, "BEGIN_S", 1.0)
    for task in (0, 200):
        with pytest.raises(Conflict, match=rf"task 1 of batch 0 .* task {task}, which has written nothing.*repartition"):
            send_once([rows_of(0)], strict, replace(second, task=task))
    with pytest.raises(Conflict, match=r"task 1 of batch 0 .* no task of this run has them"):
        Markers(strict).check_compared(second)
    Markers(strict).check_compared(first)
    assert committed_values(cluster.bootstrap, topic) == [f"0-{row}" for row in range(150, ROWS)]
    assert send_once([rows_of(0, range(150))], options_of(cluster.bootstrap, topic, markers="trusted"), second) == 150


def test_a_task_writes_when_what_earlier_runs_wrote_is_compared(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic()
    strict, first = options_of(cluster.bootstrap, topic), Unit(write=topic, batch=0, task=0, run="first")
    for task in (1, 200):
        send_once([rows_of(task)], strict, replace(first, task=task))
    may_end = threading.Event()

    def slow_rows() -> Iterator[pa.RecordBatch]:
        yield rows_of(1)
        assert may_end.wait(120)

    second = replace(first, run="second")
    runs = [
        threading.Thread(target=send_once, args=([rows_of(0)], strict, second)),
        threading.Thread(target=send_once, args=(slow_rows(), strict, replace(second, task=1))),
    ]
    for one in runs:
        one.start()
    assert send_once([rows_of(200)], strict, replace(second, task=200)) == ROWS
    with pytest.raises(Conflict, match="task 1 of batch 0"):
        Markers(strict).check_compared(second)
    assert len(committed_values(cluster.bootstrap, topic)) == 2 * ROWS, "task 0 waits for task 1"
    may_end.set()
    for one in runs:
        one.join(120)
        assert not one.is_alive()
    Markers(strict).check_compared(second)
    assert send_once([rows_of(3)], strict, replace(second, task=3)) == ROWS, "nothing is left to wait for"
    read = committed_values(cluster.bootstrap, topic)
    assert sorted(read) == sorted(f"{task}-{row}" for task in (0, 1, 3, 200) for row in range(ROWS))
    assert send_once([rows_of(4)], strict, replace(second, batch=1)) == ROWS
    with pytest.raises(Conflict, match=r"batch 1 of write .* has begun already; batch 0 comes before it"):
        send_once([rows_of(2)], strict, replace(second, task=2))


def test_batches_follow_each_other_or_markers_were_lost(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = cluster.new_topic()
    strict = options_of(cluster.bootstrap, topic)
    unit = Unit(write=topic, batch=3, task=0, run="first")
    with pytest.raises(Conflict, match=r"no marker of batch 2 .* markers=trusted"):
        send_once([rows_of(3)], strict, unit)
    assert send_once([rows_of(3)], options_of(cluster.bootstrap, topic, markers="trusted"), unit) == ROWS
    assert send_once([rows_of(4, range(0))], strict, replace(unit, batch=4)) == 0
    assert send_once([rows_of(5)], strict, replace(unit, batch=5, task=7)) == ROWS, "task 0 has begun batch 4"
    with pytest.raises(Conflict, match=r"batch 4 of write .* is written already; batch 3 comes before it"):
        send_once([rows_of(3)], strict, unit)

    class Later(SystemClock):
        def wall_ms(self) -> int:
            return super().wall_ms() + 167 * sink_markers.HOUR_MS

    monkeypatch.setattr(sink_markers, "SystemClock", Later)
    with pytest.raises(
        Conflict, match=r"batch 5 of write .* was begun 167 hours ago, and the brokers keep markers for 168 hours"
    ):
        send_once([rows_of(5)], strict, replace(unit, batch=5, task=8, run="second"))
    assert len(committed_values(cluster.bootstrap, topic)) == 2 * ROWS


def test_a_transaction_that_exceeds_its_time_is_aborted_whole(cluster: ProcessCluster) -> None:
    topic = cluster.new_topic()
    options = options_of(
        cluster.bootstrap, topic, **{"kafka.transaction.timeout.ms": "15000", "kafka.message.timeout.ms": "15000"}
    )
    unit = Unit(write=topic, batch=0, task=0)

    def slow_rows() -> Iterator[pa.RecordBatch]:
        yield rows_of(0, range(100))
        deadline = time.monotonic() + 120
        while "Abort" not in (state := cluster.json("txn", "describe", unit.name)["state"]):
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
        yield rows_of(0, range(100, ROWS))

    with pytest.raises(Fenced, match=r"raise kafka\.transaction\.timeout\.ms"):
        send_once(slow_rows(), options, unit)
    assert committed_values(cluster.bootstrap, topic) == []
    assert send_once([rows_of(0)], options_of(cluster.bootstrap, topic), unit) == ROWS
    assert len(committed_values(cluster.bootstrap, topic)) == ROWS


@pytest.mark.usefixtures("java_tools")
@pytest.mark.skipif(not RUNS_ALL, reason="takes half a minute: `make exactly-once`")
@pytest.mark.timeout(300)
def test_the_same_on_apache_kafka(tmp_path: Path) -> None:
    with KafkaCluster(tmp_path, brokers=1, heap="512m") as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        admin.create_topics([NewTopic("once", 1, 1)])["once"].result(30)
        kill_at_each_step(kafka.bootstrap, "once")
