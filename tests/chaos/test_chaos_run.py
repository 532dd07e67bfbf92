"""Less than a minute of chaos. A failure prints the ends of all logs and, last, the problems; the rest is in the files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.s3, pytest.mark.timeout(900)]
SECONDS = 45
SEED = 4
RUN_S, STOP_S = 780, 60
PHASE = re.compile(r" *[0-9.]+ s  ")
"""The beginning of a line of the run's output that names what began then."""
SHOWN = 400
"""Characters of a line that are shown, of a problem at each end."""
LINES = 20
"""Lines of a log that are shown."""
MINIMA = {
    "faults": 6,
    "sends ok": 1000,
    "cold records verified": 1000,
    "records of committed transactions in final-cold": 100,
    "keyed records acknowledged in final-cold": 100,
    "keyed records that readers found compacted away in final-cold": 10,
    "records copied in final-cold": 100,
    "records copied by copiers that were killed in final-cold": 1,
}
"""By name, the least numbers with which a run has proved something."""
ROOT = Path(__file__).parents[2]


def test_some_faults_without_an_anomaly(tmp_path: Path) -> None:
    results, output = tmp_path / "results", tmp_path / "output.txt"
    command = [sys.executable, "-m", "chaos", "--seconds", str(SECONDS), "--seed", str(SEED), "--results", str(results)]
    with (
        output.open("w") as stream,
        subprocess.Popen(command, env=_environ(), cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT) as running,
    ):
        has_ended = _has_ended(running)
    problems = "; ".join(map(_shortened, _problems(results, output, running.returncode if has_ended else None)))
    # The output's end and the first line of the error, which pytest's summary repeats, name the problems.
    print(*(_evidence(results) if problems else ()), output.read_text(), problems, sep="\n")
    assert not problems, problems
    assert _processes_of(results) == []


def _has_ended(running: subprocess.Popen[bytes]) -> bool:
    """Wait for the run; return whether it ended in time. If not, end it: an interrupted run ends its processes."""
    try:
        running.wait(RUN_S)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            running.wait(STOP_S)
        running.kill()
        return False
    return True


def _problems(results: Path, output: Path, code: int | None) -> list[str]:
    """Return what was wrong with a run that ended with ``code``; None: it did not end in time."""
    lines = output.read_text().splitlines()
    if code is None:
        return [f"the run did not end within {RUN_S} s", *[line for line in lines if PHASE.match(line)][-1:]]
    path = results / "summary.json"
    if not path.exists():
        return [f"the run ended with {code} and without a summary", *lines[-1:]]
    summary = json.loads(path.read_text())
    anomalies = [f"{each['kind']}, key {each['key']}: {each['detail']}" for each in summary["verdict"]["examples"]]
    numbers = {name: summary["numbers"].get(name, 0) for name in MINIMA}
    return [
        *summary["problems"],
        *anomalies,
        *(f"{name}: {number}; the minimum is {MINIMA[name]}" for name, number in numbers.items() if number < MINIMA[name]),
        *([f"the run ended with {code}"] if code else []),
    ]


def _evidence(results: Path) -> Iterator[str]:
    """Yield the operations that show anomalies and the ends of all logs: who reads the output may not have the files."""
    for path in (results / "offending.jsonl", *sorted((results / "cluster" / "logs").glob("*.log"))):
        if path.exists():
            yield f"== the end of {path.name}"
            yield from (line[:SHOWN] for line in path.read_text(errors="replace").splitlines()[-LINES:])


def _shortened(problem: str) -> str:
    """Return beginning and end of a problem in one line."""
    line = " ".join(problem.split())
    return line if len(line) <= 2 * SHOWN else f"{line[:SHOWN]} … {line[-SHOWN:]}"


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
