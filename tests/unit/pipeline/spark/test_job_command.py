"""``stratalog job …`` as a user runs it: a process of its own, local Spark, a bucket in a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from stratalog.commands.job import job
from stratalog.commands.spark_jobs import JobOptions, print_report
from stratalog.exit_codes import ExitCode
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Invalid
from stratalog_pipeline.jobs.report import Report

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket

pytestmark = pytest.mark.spark


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stratalog", "job", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def batches(first: int, count: int) -> list[bytes]:
    return [
        bytes(build_batch([Record(offset=o, timestamp_ms=1_700_000_000_000 + o, key=b"k", value=b"v" * 90)], compression=4))
        for o in range(first, first + count)
    ]


def test_an_audit_from_the_command_line(cold_bucket: ColdBucket, tmp_path: Path) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 50), batches(50, 50)], [batches(0, 20)]], block_bytes=2000)
    key = cold_bucket.segment_keys["flights", 0][0]
    content = bytearray((cold_bucket.root / key).read_bytes())
    content[100] ^= 1
    (cold_bucket.root / key).write_bytes(content)
    page = tmp_path / "audit.html"
    done = run("audit", "--store", str(cold_bucket.root), "--pattern", "fl.*", "--html", str(page), "--json")
    assert done.returncode == ExitCode.FINDINGS
    assert "Traceback" not in done.stderr
    # Spark logs nothing and remarks on no log level: the job reports for itself.
    assert "log4j" not in done.stderr
    assert "log level" not in done.stderr
    found = json.loads(done.stdout)
    (problem,) = found["problems"]
    assert problem.startswith(f"flights-0: segment {key}, block at byte 0, offsets 0..")
    assert (found["sound"], found["totals"]["segments"]) == (False, 3)
    assert [len(one["digest"]) for one in found["partitions"]] == [0, 64]
    assert key in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("usage", "--store", ".", "--pattern", "("), "not a regular expression"),
        (("usage", "--store", ".", "a", "--pattern", "b"), "not both"),
        (("export", "--store", "."), "Missing option '--to'"),
        (("backfill", "--topic", "t", "--partitions", "1"), "name the files to read, or the brokers of a topic to copy"),
        (("backfill", "a.csv", "--topic", "t"), "--partitions is missing"),
        (("backfill", "a.csv", "--topic", "t", "--keep-offsets"), "need --from-kafka"),
        (("backfill", "--from-kafka", "h:1", "--topic", "t", "--key", "k"), "copies a topic as it is: leave out --key"),
    ],
)
def test_wrong_usage_is_one_clear_line(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == ExitCode.USAGE
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--offsets", "7..7"), "--offsets 7..7 is empty"),
        (("--offsets", "7-8"), "--offsets must look like"),
        (("--shift", "nan"), "--shift is nan; maximum is"),
        (("--rate", "inf"), "--rate is inf; maximum is"),
        (("--delivery", "at-least-once", "--trust-markers"), "--trust-markers has no effect"),
        (("--timestamps", "now", "--shift", "5"), "--shift has no effect"),
    ],
)
def test_a_replay_of_nothing_or_at_no_time_is_refused(cold_bucket: ColdBucket, words: tuple[str, ...], message: str) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 10)]])
    done = CliRunner().invoke(job, ["replay", "--store", str(cold_bucket.root), "flights", "--to", "127.0.0.1:1", *words])
    assert isinstance(done.exception, Invalid), done.output
    assert message in done.exception.message


def test_a_missing_java_is_one_clear_line(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 10)]])
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    done = run("audit", "--store", str(cold_bucket.root))
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "Spark did not start, for the reason above: it needs Java 17 or newer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_expression_is_one_clear_line(cold_bucket: ColdBucket, tmp_path: Path) -> None:
    """PySpark logs the error of a query with its whole trace, as JSON."""
    (tmp_path / "a.csv").write_text("a\n1\n")
    where = ("--store", str(cold_bucket.root), "--metadata", "127.0.0.1:9", "--master", "local[1]")
    done = run(
        "backfill", str(tmp_path / "a.csv"), "--format", "csv", "--topic", "t", "--partitions", "1", "--key", "nothing", *where
    )  # fmt: skip
    assert done.returncode == ExitCode.USAGE
    assert "`nothing` cannot be resolved" in done.stderr
    assert "SQLQueryContextLogger" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith(("stratalog", "{"))]) == 1


def test_a_page_that_cannot_be_written_is_refused_before_the_job(cold_bucket: ColdBucket, tmp_path: Path) -> None:
    page = tmp_path / "nowhere" / "audit.html"
    done = CliRunner().invoke(job, ["audit", "--store", str(cold_bucket.root), "--html", str(page)])
    assert isinstance(done.exception, Invalid), done.output
    assert done.exception.message == f"--html {page}: there is no directory {page.parent}"


def test_a_report_is_printed_although_its_page_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(title="Erase", document={"records_erased": 7}, facts={}, tables=[])
    where = JobOptions(
        store="/s", topics=(), pattern=None, topic_ids=(), master=None, as_json=True, html=tmp_path / "gone" / "page.html"
    )
    with pytest.raises(FileNotFoundError):
        print_report(where, report)
    assert json.loads(capsys.readouterr().out) == {"records_erased": 7}
