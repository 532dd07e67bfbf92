"""Java's Admin client and a hand-written producer see the recorded outcomes, or Apache Kafka's; differences have reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.admin_calls import NOT_CALLED, OTHER_ISSUES
from integration.compatibility import (
    BATCHES,
    CALLS,
    CONFIGS,
    ENDS,
    KAFKA,
    OWN,
    READS,
    REASONS,
    differences,
    page,
    recorded,
    run_all,
)
from integration.process_cluster import ProcessCluster

from stratalog_broker.admin.broker_configs import broker_configs
from stratalog_broker.configs.settings import BrokerSettings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"


@pytest.mark.integration
@pytest.mark.usefixtures("java_tools")
def test_each_outcome_is_the_recorded_one(cluster: ProcessCluster) -> None:
    found = run_all(cluster.bootstrap, "s")
    for kind, outcomes in found.items():
        expected = {pair for of_cluster in recorded().values() for pair in of_cluster[kind].items()}
        assert sorted(outcomes.items() - expected) == [], "run: make compatibility"


@pytest.mark.parametrize("kind", [CALLS, BATCHES, CONFIGS, ENDS, READS])
def test_each_difference_has_a_reason(kind: str) -> None:
    assert differences(kind).keys() == REASONS[kind].keys()


def test_each_setting_of_a_broker_is_recorded() -> None:
    described = {f"BROKER {config.name}" for config in broker_configs(BrokerSettings(broker_id=1))}
    assert sorted(described - recorded()[OWN][CONFIGS].keys()) == [], "run: make compatibility"


def test_each_method_is_called() -> None:
    missing = recorded()[KAFKA][CALLS][NOT_CALLED].split()
    assert [method for method in missing if not any(word in method for word in OTHER_ISSUES)] == []


def test_the_page_of_differences_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run: make compatibility"
