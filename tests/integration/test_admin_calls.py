"""Each method of Java's Admin client has the recorded outcome, or Apache Kafka's; differences have known reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.admin_calls import NOT_CALLED, OTHER_ISSUES, REASONS, differences, page, recorded, run_calls
from integration.process_cluster import ProcessCluster

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"


@pytest.mark.integration
@pytest.mark.usefixtures("java_tools")
def test_each_call_has_the_recorded_outcome(cluster: ProcessCluster) -> None:
    record = recorded()
    expected = {(call, outcome) for outcomes in record.values() for call, outcome in outcomes.items()}
    assert sorted(run_calls(cluster.bootstrap, "s").items() - expected) == [], "run: make compatibility"


def test_each_difference_has_a_reason_and_each_method_is_called() -> None:
    assert differences().keys() == REASONS.keys()
    missing = recorded()["kafka"][NOT_CALLED].split()
    assert [method for method in missing if not any(word in method for word in OTHER_ISSUES)] == []


def test_the_page_of_differences_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run: make compatibility"
