"""The two clusters that each suite runs on: Apache Kafka as the control, and Stratalog's processes, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.kafka_control import KafkaCluster
from integration.process_cluster import ProcessCluster

KAFKA, OWN = "kafka", "stratalog"
_CONTROL: Final = {
    "default.replication.factor": "2", "offsets.topic.replication.factor": "2", "min.insync.replicas": "1",
    "transaction.state.log.replication.factor": "2", "transaction.state.log.min.isr": "1",
}  # fmt: skip


@contextmanager
def cluster(which: str, directory: Path) -> Iterator[str]:
    """A running cluster; yields its bootstrap address."""
    if which == KAFKA:
        with KafkaCluster(directory / which, brokers=2, heap="400m", extra=_CONTROL) as control:
            yield control.bootstrap
        return
    own = ProcessCluster(directory / which)
    own.run("cluster", "start", "--metadata", "3", "--bookies", "3", "--brokers", "2", "--tiering", "1")
    try:
        yield own.bootstrap
    finally:
        own.run("cluster", "stop")
