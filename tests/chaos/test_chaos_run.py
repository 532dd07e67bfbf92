"""Less than a minute of chaos. A failure prints the problems; the run's directory holds history and logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.s3, pytest.mark.timeout(900)]
SECONDS = 45
SEED = 4
ROOT = Path(__file__).parents[2]


def test_some_faults_without_an_anomaly(tmp_path: Path) -> None:
    results = tmp_path / "results"
    command = [sys.executable, "-m", "chaos", "--seconds", str(SECONDS), "--seed", str(SEED), "--results", str(results)]
    done = subprocess.run(command, env=_environ(), cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = json.loads((results / "summary.json").read_text())
    assert summary["numbers"]["faults"] >= 2
    assert summary["numbers"]["sends ok"] > 1000
    assert summary["numbers"]["cold records verified"] > 1000
    assert summary["numbers"]["records of committed transactions in final-cold"] > 100
    assert summary["numbers"]["keyed records acknowledged in final-cold"] > 100
    assert summary["numbers"]["keyed records that readers found compacted away in final-cold"] > 10
    assert summary["numbers"]["records copied in final-cold"] > 100
    assert summary["numbers"]["records copied by copiers that were killed in final-cold"] > 0
    assert _processes_of(results) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_a_run_that_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    results = tmp_path / "results"
    command = [sys.executable, "-m", "chaos", "--seconds", "60", "--seed", "1", "--results", str(results)]
    with subprocess.Popen(command, env=_environ(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        _wait_until(lambda: len(_processes_of(results / "cluster")) >= 10)
        running.send_signal(number)
    _wait_until(lambda: not _processes_of(results))


def _environ() -> dict[str, str]:
    if not os.environ.get("STRATALOG_MINIO"):
        pytest.skip("no MinIO: set STRATALOG_MINIO to its binary (make tools builds it)")
    return {**os.environ, "PYTHONPATH": str(ROOT / "tests")}


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _processes_of(results: Path) -> list[str]:
    """Return the command lines of processes that still run with the directory."""
    lines = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(results) in line:
            lines.append(line)
    return lines
