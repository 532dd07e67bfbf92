"""The final checks of the administrator and of Java's producer, the jumping clock, the flipped bit, and tied processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from chaos.administrator import wrong_topics
from chaos.java_producer import wrong_places
from chaos.jumping_clock import JumpingClock, set_clock
from chaos.nemesis import flip_bit
from chaos.producers import DRAIN


@pytest.mark.parametrize(
    ("found", "problems"),
    [
        ({"a": 2, "unknown": 1}, []),
        ({}, ["topic a was created and is missing"]),
        ({"a": 1}, ["topic a has 1 partitions and should have 2"]),
        ({"a": 2, "b": 1}, ["topic b was deleted and still exists"]),
    ],
)
def test_topics_are_compared_with_what_was_confirmed(found: dict[str, int], problems: list[str]) -> None:
    assert wrong_topics(found, {"a": 2}, {"b"}) == problems


def test_acknowledged_values_are_at_their_places_once() -> None:
    acknowledged = {"1.0": (0, 0), "1.1": (1, 0)}
    assert wrong_places([("1.0", (0, 0)), ("1.1", (1, 0)), ("1.2", (0, 1))], acknowledged) == []
    (lost,) = wrong_places([("1.0", (0, 0))], acknowledged)
    assert "1.1 at None instead of (1, 0)" in lost
    (moved,) = wrong_places([("1.0", (0, 0)), ("1.1", (1, 1))], acknowledged)
    assert "1.1 at (1, 1) instead of (1, 0)" in moved
    (twice,) = wrong_places([("1.0", (0, 0)), ("1.1", (1, 0)), ("1.2", (0, 1)), ("1.2", (0, 2))], acknowledged)
    assert "1 values are there twice: 1.2" in twice


@pytest.mark.parametrize("state", ["", "in state Assigned "])
def test_the_reason_of_a_new_epoch_is_found_in_the_log(state: str) -> None:
    line = (
        f"DRAIN [hasty#producer-4] [thrd:127.0.0.1:1/2]: Beginning partition drain {state}for PID{{Id:1000,Epoch:5}} epoch bump"
        " for 3 partition(s) with in-flight requests: 1 message(s) timed out on hot [2]"
    )
    found = DRAIN.search(line)
    assert found
    assert found[1] == "1 message(s) timed out on hot [2]"


def test_the_wall_clock_jumps_and_the_monotonic_clock_does_not(tmp_path: Path) -> None:
    control = tmp_path / "bookie-1.clock"
    set_clock(control, 3_600_000)
    true = JumpingClock(tmp_path / "none.clock")
    ahead = JumpingClock(control)
    assert 3_000_000 < ahead.wall_ms() - true.wall_ms() < 4_200_000
    assert abs(ahead.monotonic() - true.monotonic()) < 60
    set_clock(control, -3_600_000)
    assert JumpingClock(control).wall_ms() < true.wall_ms()


def test_one_bit_of_the_file_flips(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    flip_bit(path, random.Random(1))
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1


_PARENT = """
import subprocess, time
from chaos.tether import tether_environment, tethered
child = subprocess.Popen(tethered(["sleep", "1000"]), env=tether_environment())
print(child.pid, flush=True)
time.sleep(1000)
"""


def test_a_tied_process_dies_with_its_parent_however_that_ends() -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", _PARENT], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        _wait_until(lambda: child.name() == "sleep")
        parent.kill()
    _wait_until(lambda: _has_ended(child))


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
