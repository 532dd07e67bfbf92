"""Compares the page on reliability tests with the scenarios, mutants and runs that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from simulation.checkers.coverage import PROGRESS
from simulation.mutants.hunt import NEEDED_MAX, NOT_NOTICED_YET, SAMPLE_SEEDS, all_mutants
from simulation.runs import SCENARIOS
from simulation.test_simulation import FRESH_SEEDS, SAMPLE_S, SEEDS

PAGE: Final = Path(__file__).parents[2] / "docs" / "lab" / "reliability.md"
_FIRST_CELL: Final = re.compile(r"\| `([a-z0-9_-]+)` \|")


def _section(title: str) -> str:
    """The text below a heading up to the next one of its level."""
    return PAGE.read_text().split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def _first_cells(section: str) -> list[str]:
    return [found[1] for line in section.splitlines() if (found := _FIRST_CELL.match(line))]


def test_the_page_has_each_scenario_once() -> None:
    assert sorted(_first_cells(_section("Scenarios"))) == sorted(SCENARIOS)


def test_the_page_has_each_mutant_once() -> None:
    assert sorted(_first_cells(_section("Planted faults"))) == sorted(mutant.name for mutant in all_mutants())


def test_the_page_has_the_numbers_of_runs() -> None:
    each, fresh_each = SEEDS // len(SCENARIOS), FRESH_SEEDS // len(SCENARIOS)

    assert (each * len(SCENARIOS), fresh_each * len(SCENARIOS)) == (SEEDS, FRESH_SEEDS)
    assert f"runs {SEEDS} fixed seeds and {FRESH_SEEDS} fresh ones" in _section("Seeds, states and progress")
    assert f"runs {SEEDS + FRESH_SEEDS} seeds" in _section("How fast")
    planted = _section("Planted faults")
    assert f"for {SAMPLE_S} seconds" in planted
    assert f"at most {NEEDED_MAX} seeds" in planted
    assert f"tries {SAMPLE_SEEDS} seeds" in planted


def test_the_page_names_the_mutants_that_are_not_noticed_yet() -> None:
    section = _section("Planted faults").split("\n### Not noticed yet\n", 1)[1].split("\n### ", 1)[0]

    assert re.findall(r"^- `([a-z0-9_]+)`", section, re.MULTILINE) == sorted(NOT_NOTICED_YET)


def test_progress_is_required_of_scenarios_that_exist() -> None:
    assert PROGRESS.keys() <= SCENARIOS.keys()
