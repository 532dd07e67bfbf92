"""Which planted faults a sample draws, and what the end of a hunt says of its survivors."""

from __future__ import annotations

import json

import pytest

from simulation.mutants.hunt import (
    KILLING_SEEDS,
    NEEDED_MAX,
    NOT_NOTICED_YET,
    Kill,
    all_mutants,
    sample_of,
    summary,
)

KILLED = Kill(seed=3, failure="AssertionError: two records at offset 7", seconds=1.0)
SURVIVED = Kill(seed=30, failure="", seconds=60.0)
KNOWN = "known"


@pytest.fixture(autouse=True)
def one_known_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOT_NOTICED_YET, KNOWN, "it happens too rarely")


def test_a_sample_draws_what_few_seeds_notice() -> None:
    recorded = {"soon": 1, "at_the_limit": NEEDED_MAX, "late": NEEDED_MAX + 1, KNOWN: 1}
    mutants = [*recorded, "never_recorded"]

    assert sorted(sample_of(mutants, recorded, 1)) == ["at_the_limit", "soon"]
    assert len({tuple(sample_of(mutants, recorded, seed)) for seed in range(20)}) == 2


def test_a_sample_can_draw_most_mutants() -> None:
    """Not all: each time seeds are recorded anew, some mutants of middling rarity need a seed more than ``NEEDED_MAX``."""
    names = [mutant.name for mutant in all_mutants()]

    assert len(sample_of(names, json.loads(KILLING_SEEDS.read_text()), 1)) > 0.8 * len(names)


def test_the_last_line_names_who_survived() -> None:
    assert summary({"a": KILLED, "b": SURVIVED, "c": SURVIVED})[-1] == "1 killed, 2 survived: b, c"
    assert summary({"a": KILLED})[-1] == "1 killed, 0 survived"


def test_a_known_hole_is_shown_and_is_no_survivor() -> None:
    assert summary({KNOWN: SURVIVED}) == [f"NOT NOTICED YET {KNOWN}: {NOT_NOTICED_YET[KNOWN]}", "0 killed, 0 survived"]


def test_a_known_hole_that_is_noticed_is_shown() -> None:
    assert summary({KNOWN: KILLED}) == [f"noticed this time, although it usually is not: {KNOWN}", "1 killed, 0 survived"]


def test_each_known_hole_is_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(NOT_NOTICED_YET, KNOWN)

    assert NOT_NOTICED_YET.keys() <= {mutant.name for mutant in all_mutants()}
