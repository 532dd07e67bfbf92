"""``stratalog up``: the first record within seconds, data that survives a kill, a graceful stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stratalog.exit_codes import ExitCode

pytestmark = pytest.mark.integration
FIRST_RECORD_S = 30.0


@contextmanager
def _up(data: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "stratalog", "up", "--data", str(data), "--kafka", "127.0.0.1:0"]
    with (
        (data.parent / "log").open("a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as node,
    ):
        try:
            assert node.stdout is not None
            line = node.stdout.readline()
            assert "serves Kafka clients at" in line, (data.parent / "log").read_text()
            yield node
        finally:
            node.kill()


def _stratalog(data: Path, *words: str, expect: int = 0) -> str:
    command = [sys.executable, "-m", "stratalog", *words, "--data", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == expect, done.stderr
    return done.stdout


def test_first_record_offload_and_restart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    began = time.monotonic()
    with _up(data) as node:
        _stratalog(data, "produce", "greetings", "--value", "hello")
        assert _stratalog(data, "consume", "greetings") == "hello\n"
        assert time.monotonic() - began < FIRST_RECORD_S
        _stratalog(data, "up", expect=ExitCode.CONFLICT)
        _stratalog(data, "tier", "offload", "greetings", "--wait", "--delete-hot")
        _stratalog(data, "produce", "greetings", "--value", "again")
        node.send_signal(signal.SIGKILL)
        node.wait()
    with _up(data) as node:
        assert _stratalog(data, "consume", "greetings") == "hello\nagain\n"
        status = json.loads(_stratalog(data, "tier", "status", "greetings", "--json"))["partitions"]
        assert status[0]["cold_end_offset"] == 1
        node.send_signal(signal.SIGTERM)
        assert node.wait(30) == 0
