"""What ``stratalog job`` checks before Spark, which takes long to start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.two_partitions import TOPIC, write_two_partitions

from stratalog.app import stratalog
from stratalog.commands import job
from stratalog.exit_codes import ExitCode, exit_code_of
from stratalog.local.state import ClusterState, save_state
from stratalog_core.errors import Invalid, NotFound
from stratalog_pipeline.jobs import replay, session
from stratalog_pipeline.kafka_sink import WriteOptions

_ERASE = ("erase", "--key", "a", "--dry-run")
_REPLAY = ("replay", "--to", "127.0.0.1:9")
_JOBS = (("audit",), ("usage",), ("export", "--to", "out"), _ERASE)


class _SparkStarted(Exception):
    """The job has passed its checks."""


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refused(name: str, master: str | None) -> Iterator[None]:
        raise _SparkStarted(name, master)
        yield

    monkeypatch.setattr(session, "job_session", refused)
    for name in ("STRATALOG_DATA", "STRATALOG_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # Else the command sets it, for the whole process.


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_two_partitions(tmp_path / "store")
    return tmp_path / "store"


def _run(*words: str) -> Result:
    return CliRunner().invoke(stratalog, ["job", *words])


@pytest.mark.parametrize(("given", "master"), [((), "local[*,4]"), (("--master", "local[2]"), "local[2]")])
def test_spark_on_this_machine_runs_a_failed_task_again(store: Path, given: tuple[str, ...], master: str) -> None:
    """As on a cluster. With `local[*]`, one answer that the store did not give would end an audit of hours."""
    done = _run("audit", "--store", str(store), *given)
    assert isinstance(done.exception, _SparkStarted)
    assert done.exception.args == ("audit", master)


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "--bootstrap"),
        ("replay", "--to"),
        ("replay", "--to", "127.0.0.1:9", "--bootstrap"),
        ("backfill", "--topic", "t", "--from-kafka"),
    ],
    ids=" ".join,
)
def test_an_impossible_port_is_wrong_usage_before_spark_starts(words: tuple[str, ...], store: Path) -> None:
    done = _run(*words, "127.0.0.1:99999", "--store", str(store))
    assert done.exit_code == ExitCode.USAGE
    assert "the port must be a number from 1 to 65535" in done.stderr


@pytest.mark.parametrize(
    "words",
    [*_JOBS, _REPLAY, (*_REPLAY, "--offsets", "0..1")],
    ids=" ".join,
)
def test_a_mistyped_topic_is_not_found_before_spark_starts(words: tuple[str, ...], store: Path) -> None:
    failure = _run(*words, "fligts", "--store", str(store)).exception
    assert isinstance(failure, NotFound), failure
    assert failure.message == "topic 'fligts' is not in this bucket; did you mean 'flights'?"
    assert exit_code_of(failure) == ExitCode.NOT_FOUND


@pytest.mark.parametrize("words", _JOBS, ids=" ".join)
def test_a_topic_of_the_bucket_starts_spark(words: tuple[str, ...], store: Path) -> None:
    assert isinstance(_run(*words, TOPIC.name, "--store", str(store)).exception, _SparkStarted)


@pytest.mark.parametrize("words", _JOBS, ids=" ".join)
@pytest.mark.parametrize("given", [(), ("--data", "data")], ids=["beside the cluster", "named"])
def test_the_default_store_is_the_clusters(
    given: tuple[str, ...], words: tuple[str, ...], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    save_state(data, ClusterState(bootstrap="127.0.0.1:9", metadata="127.0.0.1:9", store=str(store), processes=()))
    assert isinstance(_run(*words, TOPIC.name, *given).exception, _SparkStarted)


def test_an_erasure_takes_quorum_and_store_from_one_directory(store: Path, tmp_path: Path) -> None:
    data = tmp_path / "c1"
    data.mkdir()
    save_state(data, ClusterState(bootstrap="127.0.0.1:9", metadata="127.0.0.1:9", store=str(store), processes=()))
    assert isinstance(_run("erase", "--key", "a", TOPIC.name, "--data", str(data)).exception, _SparkStarted)


@pytest.mark.parametrize("words", _JOBS, ids=" ".join)
def test_without_cluster_and_store_the_job_says_what_to_give(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = _run(*words, TOPIC.name).exception
    assert isinstance(failure, Invalid), failure
    assert "no object store given: name the cluster's directory with --data, or the store with --store" in failure.message


@pytest.mark.parametrize("words", [(TOPIC.name,), (), (TOPIC.name, "--checkpoint", "done")], ids=" ".join)
def test_a_replay_looks_for_its_target_before_spark_starts(
    words: tuple[str, ...], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def missing(options: WriteOptions) -> int:
        asked.append((options.topic, options.client["bootstrap.servers"]))
        raise NotFound("no such topic")

    monkeypatch.setattr(replay, "check_topic", missing)
    assert isinstance(_run(*_REPLAY, *words, "--store", str(store)).exception, NotFound)
    assert asked == [("flights.replay", "127.0.0.1:9")]


def test_a_continued_replay_of_a_pattern_does_not_ask_for_the_targets_of_new_topics(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(options: WriteOptions) -> int:
        raise NotFound("no such topic")

    monkeypatch.setattr(replay, "check_topic", missing)
    words = (*_REPLAY, "--pattern", "fl.*", "--checkpoint", "done", "--store", str(store))
    assert isinstance(_run(*words).exception, _SparkStarted)


@pytest.mark.parametrize("words", [*_JOBS, _REPLAY], ids=" ".join)
def test_a_pattern_that_no_topic_matches_is_not_found(words: tuple[str, ...], store: Path) -> None:
    """An erasure was complete, and an audit sound, whatever was mistyped."""
    failure = _run(*words, "--pattern", "fligts.*", "--store", str(store)).exception
    assert isinstance(failure, NotFound), failure
    assert failure.message == "no topic in the bucket matches --pattern 'fligts.*'"


def test_spark_submit_gets_the_exit_codes_of_the_command(store: Path) -> None:
    words = [sys.executable, str(job.__file__), "audit", "fligts", "--store", str(store)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.NOT_FOUND, "")
    assert done.stderr == "stratalog: topic 'fligts' is not in this bucket; did you mean 'flights'?\n"


def test_a_schema_that_is_not_text_is_named(store: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema"
    schema.write_bytes(b"\xff")
    words = ("backfill", "a.avro", "--format", "avro", "--topic", "t", "--partitions", "1", "--avro-schema", str(schema))
    failure = _run(*words, "--store", str(store), "--metadata", "127.0.0.1:9").exception
    assert isinstance(failure, Invalid), failure
    assert failure.message.startswith(f"--avro-schema {schema} is not text in UTF-8")
