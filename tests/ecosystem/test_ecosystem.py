"""The record of the suites explains each difference, and its page is fresh. ``make ecosystem`` runs the suites."""

from __future__ import annotations

import pytest
from ecosystem.clusters import KAFKA
from ecosystem.record import PAGE, differences, page, recorded
from ecosystem.suites import SUITES


def test_each_suite_has_run() -> None:
    assert list(recorded()) == list(SUITES)


@pytest.mark.parametrize("suite", SUITES)
def test_the_run_was_of_the_pinned_version(suite: str) -> None:
    assert recorded()[suite]["version"] == SUITES[suite].version, "run: make ecosystem"
    assert recorded()[suite][KAFKA]


@pytest.mark.parametrize("suite", SUITES)
def test_each_difference_has_a_reason(suite: str) -> None:
    assert differences(suite).keys() == SUITES[suite].reasons.keys()


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run: make ecosystem"
