"""A sample of ``make ecosystem``: franz-go's steps have the recorded outcomes of Apache Kafka."""

from __future__ import annotations

from pathlib import Path

import pytest
from ecosystem.clusters import KAFKA
from ecosystem.record import recorded
from ecosystem.suites import SUITES
from integration.process_cluster import ProcessCluster

pytestmark = pytest.mark.integration


def test_each_step_has_the_outcome_that_it_has_on_apache_kafka(cluster: ProcessCluster, tmp_path: Path) -> None:
    outcomes = SUITES["franz-go"].run(cluster.bootstrap, cluster.new_group(), tmp_path)
    assert outcomes == recorded()["franz-go"][KAFKA]
