"""A few seeds of every scenario in each test run, those that once found a bug, and that a seed decides everything."""

from __future__ import annotations

import pytest

from simulation.__main__ import run_one

ONCE_BROKEN = [
    ("quorum", 110),  # removals of old log files became durable out of order and left a gap
]


@pytest.mark.parametrize(("scenario", "seed"), ONCE_BROKEN)
def test_seeds_that_found_a_bug(scenario: str, seed: int) -> None:
    assert run_one(scenario, seed).failure == ""


@pytest.mark.parametrize("scenario", ["quorum", "log"])
@pytest.mark.parametrize("seed", [1, 2])
def test_invariants_hold(scenario: str, seed: int) -> None:
    print(f"seed {seed}")
    assert run_one(scenario, seed).failure == ""


@pytest.mark.parametrize("scenario", ["quorum", "log"])
def test_the_same_seed_gives_the_same_trace(scenario: str) -> None:
    first, second = run_one(scenario, 3), run_one(scenario, 3)

    assert first.trace == second.trace
