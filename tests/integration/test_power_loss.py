"""All bookies and metadata nodes lose power at once, under load: nothing acknowledged is lost.

``make power`` runs it with a million records; here it is a sample.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.tether import PARENT
from chaos.unsynced_files import has_unsynced, lose_power
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from integration.process_cluster import ProcessCluster

pytestmark = [pytest.mark.alone, pytest.mark.integration]
RECORDS = int(os.environ.get("STRATALOG_POWER_RECORDS", "30000"))
CUTS = 3
UNANSWERED_MAX = min(RECORDS // 10, 50_000)
"""Records that the client holds at once: half of the 100,000 that it takes."""
PARTITIONS = 6
TIMEOUT_S = 120.0
WATCH_S = 0.1
RETRY_RECORDS = 100
"""Sent before the next attempt if nothing was unsynced."""
SEED = 20261122


class PoweredCluster:
    """A cluster whose bookies and metadata nodes this process starts, and whose power it cuts."""

    def __init__(self, data: Path) -> None:
        self.cluster = ProcessCluster(data)
        self.randomness = random.Random(SEED)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        sizes = ("--metadata", "3", "--bookies", "3", "--brokers", "1", "--tiering", "0")
        self.cluster.run("cluster", "start", *sizes)
        self.topic = self.cluster.new_topic(PARTITIONS)
        self.names = [each["name"] for role in ("metadata", "bookie") for each in self.cluster.processes(role)]
        self.cluster.run("cluster", "stop", *self.names)
        self.start()

    def start(self) -> None:
        for name in self.names:
            config = self.cluster.data / "config" / f"{name}.toml"
            command = [sys.executable, "-m", "chaos.unsynced_role", name.partition("-")[0], "--config", str(config)]
            environ = {**os.environ, PARENT: str(os.getpid()), "PYTHONPATH": os.pathsep.join(sys.path)}
            with (self.cluster.data / "logs" / f"{name}.log").open("ab") as log:
                self._running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    def cut_power(self) -> bool:
        """Cut the power of all processes at once if something is unsynced; return whether it was cut."""
        roots = [self.cluster.data / name for name in self.names]
        deadline = time.monotonic() + WATCH_S
        while not any(map(has_unsynced, roots)):
            if time.monotonic() > deadline:
                return False
        for process in self._running.values():
            process.send_signal(signal.SIGSTOP)
        for process in self._running.values():
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        # Check again: only a stopped process cannot sync in the meantime.
        cut = any(map(has_unsynced, roots))
        for process in self._running.values():
            process.send_signal(signal.SIGKILL if cut else signal.SIGCONT)
        if not cut:
            return False
        for process in self._running.values():
            assert process.wait() == -signal.SIGKILL, "it had not ended by itself"
        assert sum(lose_power(root, self.randomness) for root in roots), "each cut takes something that was not synced"
        return True

    def close(self) -> None:
        """Stop the broker, then the bookies, then the metadata nodes: none waits for one that stopped before."""
        self.cluster.run("cluster", "stop")
        for name in reversed(self.names):
            self._running[name].terminate()
            self._running[name].wait()


@pytest.fixture
def powered(tmp_path: Path) -> Iterator[PoweredCluster]:
    cluster = PoweredCluster(tmp_path / "data")
    yield cluster
    cluster.close()


class Acknowledged:
    """The acknowledged records: partition and offset by value."""

    def __init__(self) -> None:
        self.where: dict[bytes, tuple[int, int | None]] = {}
        self.failures: list[str] = []

    def delivered(self, failure: KafkaError | None, message: Message) -> None:
        if failure is not None:
            self.failures.append(failure.str())
        else:
            self.where[message.value() or b""] = message.partition() or 0, message.offset()


@pytest.mark.timeout(600 + RECORDS // 200)
def test_nothing_acknowledged_is_lost_when_all_lose_power(powered: PoweredCluster) -> None:
    acknowledged = Acknowledged()
    producer = Producer(
        {
            "bootstrap.servers": powered.cluster.bootstrap,
            "enable.idempotence": True,
            "linger.ms": 2,
            "batch.num.messages": 200,
            "delivery.timeout.ms": int(TIMEOUT_S * 1000),
            "log_level": 0,
        }
    )
    due = [RECORDS * (number + 1) // (CUTS + 1) for number in range(CUTS)]
    for number in range(RECORDS):
        producer.produce(powered.topic, b"%d" % number, partition=number % PARTITIONS, on_delivery=acknowledged.delivered)
        producer.poll(0)
        if due and len(acknowledged.where) >= due[0] and number % RETRY_RECORDS == 0 and powered.cut_power():
            powered.start()
            due.pop(0)
        while len(producer) > UNANSWERED_MAX:
            producer.poll(0.1)
    assert producer.flush(TIMEOUT_S) == 0
    assert not acknowledged.failures, acknowledged.failures[:3]
    assert not due, f"{CUTS - len(due)} of {CUTS} cuts"
    assert len(acknowledged.where) == RECORDS
    found = _read_all(powered)
    # librdkafka does not know the offset of a batch of which only a later one's answer came.
    places = {value: place for place, value in found.items()}
    lost = {
        value: (partition, offset)
        for value, (partition, offset) in acknowledged.where.items()
        if (found.get((partition, offset)) != value if offset is not None else value not in places)
    }
    assert not lost, f"{len(lost)} of {RECORDS} acknowledged records are lost: {sorted(lost.items())[:3]}"


def _read_all(powered: PoweredCluster) -> dict[tuple[int, int], bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": powered.cluster.bootstrap,
            "group.id": powered.cluster.new_group(),
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(powered.topic, partition, 0) for partition in range(PARTITIONS)])
    found: dict[tuple[int, int], bytes] = {}
    ended: set[int] = set()
    deadline = time.monotonic() + TIMEOUT_S + RECORDS / 1000
    while len(ended) < PARTITIONS:
        assert time.monotonic() < deadline, f"{len(found)} records found in time"
        message = consumer.poll(1.0)
        if message is None:
            continue
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition() or 0)
            continue
        found[message.partition() or 0, message.offset() or 0] = message.value() or b""
    consumer.close()
    return found
