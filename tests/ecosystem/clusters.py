"""The two clusters that each suite runs on: Apache Kafka as the control, and Stratalog's processes, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.kafka_control import KafkaCluster
from integration.process_cluster import ProcessCluster

KAFKA, OWN = "kafka", "stratalog"
BROKERS: Final = 2


def control_settings(copies: int) -> dict[str, str]:
    """Settings of an Apache Kafka whose topics have ``copies`` copies, its internal ones included."""
    kinds = ("default.replication.factor", "offsets.topic.replication.factor", "transaction.state.log.replication.factor")
    return dict.fromkeys(kinds, str(copies)) | {"min.insync.replicas": "1", "transaction.state.log.min.isr": "1"}


@contextmanager
def cluster(which: str, directory: Path, brokers: int = BROKERS) -> Iterator[str]:
    """A running cluster; yields its bootstrap address."""
    if which == KAFKA:
        with KafkaCluster(directory / which, brokers=brokers, heap="400m", extra=control_settings(brokers)) as control:
            yield control.bootstrap
        return
    own = ProcessCluster(directory / which)
    own.run("cluster", "start", "--metadata", "3", "--bookies", "3", "--brokers", str(brokers), "--tiering", "1")
    try:
        yield own.bootstrap
    finally:
        own.run("cluster", "stop")
