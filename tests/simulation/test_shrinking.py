"""A run of a product with a planted fault is shrunk to a few decisions that still break the same invariant."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.shrinking import kind_of

pytestmark = pytest.mark.timeout(3000)
TESTS = Path(__file__).parents[1]
PLANTED = """
import sys
from simulation.mutants import bookies
from simulation.__main__ import main
bookies.recovery_closes_at_the_lac()
sys.exit(main())
"""


def simulate_planted(*words: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", PLANTED, "--scenario", "ledgers", *words]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_failing_run_is_shrunk_and_what_is_left_fails_again() -> None:
    shrunk = simulate_planted("--first-seed", "1", "--seeds", "3", "--shrink-seconds", "600")

    before = re.search(r"shrinking scenario ledgers, seed \d+: (\d+) decisions", shrunk)
    after = re.search(r"(\d+) decisions are left", shrunk)
    again = re.search(r"repeat with: make sim SCENARIO=ledgers SEED=(\d+) KEEP=(\S+)", shrunk)
    assert before is not None, shrunk
    assert after is not None, shrunk
    assert again is not None, shrunk
    assert int(after[1]) < int(before[1])
    repeated = simulate_planted("--seed", again[1], "--keep", again[2])
    assert re.search(r"BROKEN AssertionError: ledger \d+ ends at \d+, and \d+ was confirmed", repeated), repeated


def test_failures_that_differ_in_numbers_only_are_of_one_kind() -> None:
    one = "AssertionError: ledger 0 ends at 30, and 31 was confirmed"
    other = "AssertionError: ledger 12 ends at 7, and 110 was confirmed"

    assert kind_of(one) == kind_of(other)
    assert kind_of(one) != kind_of("AssertionError: partition 0 has duplicates")
