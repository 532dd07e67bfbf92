"""A few seeds of every scenario in each test run, those that once found a bug, and that a seed decides everything.

Each runs in a process of its own, as ``make sim`` runs them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ONCE_BROKEN = [
    ("quorum", 110),  # removals of old log files became durable out of order and left a gap
]


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "simulation", *words]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(("scenario", "seed"), ONCE_BROKEN)
def test_seeds_that_found_a_bug(scenario: str, seed: int) -> None:
    done = simulate("--scenario", scenario, "--seed", str(seed))

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("scenario", ["quorum", "log"])
def test_invariants_hold(scenario: str) -> None:
    done = simulate("--scenario", scenario, "--first-seed", "1", "--seeds", "8")

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "8 passed, 0 failed" in done.stdout


@pytest.mark.parametrize("scenario", ["quorum", "log"])
def test_the_same_seed_gives_the_same_trace(scenario: str) -> None:
    first, second = (simulate("--scenario", scenario, "--seed", "3").stdout for _ in range(2))

    assert first.count("\n") > 20
    assert first == second
