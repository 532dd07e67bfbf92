"""Kafka Streams under ``exactly_once_v2``: an application and a broker are killed; each record has its effect exactly once."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Consumer, Producer
from integration.process_cluster import ProcessCluster

from stratalog_loadgen.java_tools import KAFKA_VERSION, SLF4J_VERSION, jars

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("java_tools")]

SOURCE: Final = Path(__file__).parent / "java" / "StreamsJobs.java"
JARS: Final = (("org.apache.kafka", "kafka-streams", KAFKA_VERSION), ("org.slf4j", "slf4j-simple", SLF4J_VERSION))
PARTITIONS: Final = 2
WORDS: Final = ("brave", "new", "log", "of", "old", "words", "and", "more")
LINES, PAIRS = 600, 300
TIMEOUT_S: Final = 240.0


@contextmanager
def application(cluster: ProcessCluster, name: str, state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running application; killed at the end, so that its transaction stays open."""
    class_path = f"{jars('streams', KAFKA_VERSION, JARS)}/*"
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
    command = ["java", *options, "-cp", class_path, str(SOURCE), cluster.bootstrap, name, str(state)]
    output = state.with_suffix(".out")
    with output.open("wb") as written, subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT) as process:
        try:
            _wait(lambda: "RUNNING" in output.read_text().split(), lambda: output.read_text()[-3000:])
            yield process
        finally:
            process.kill()


def _wait(condition: object, complaint: object) -> None:
    assert callable(condition)
    assert callable(complaint)
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.2)


class Inputs:
    """Writes the topics that the application reads, in three parts."""

    def __init__(self, cluster: ProcessCluster, name: str) -> None:
        self._producer = Producer(
            {"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "linger.ms": 20, "log_level": 0}
        )
        self._name = name

    def write(self, part: int) -> None:
        """Write one third of the lines and pairs; return when all are acknowledged."""
        for number in range(part, LINES, 3):
            self._send("lines", str(number), line(number))
        for number in range(part, PAIRS, 3):
            self._send("left", str(number), f"l{number}")
            self._send("right", str(number), f"r{number}")
        assert self._producer.flush(60) == 0

    def _send(self, topic: str, key: str, value: str) -> None:
        self._producer.produce(f"{self._name}-{topic}", value, key)
        self._producer.poll(0)


def line(number: int) -> str:
    return f"{WORDS[number % len(WORDS)]} {WORDS[number * 3 % len(WORDS)]}"


class Output:
    """Committed records of the output topics, in order by key."""

    def __init__(self, cluster: ProcessCluster, name: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap, "group.id": f"{name}-check", "auto.offset.reset": "earliest",
                "isolation.level": "read_committed", "enable.auto.commit": False, "log_level": 0,
            }
        )  # fmt: skip
        self.counts: defaultdict[str, list[int]] = defaultdict(list)
        self.joined: list[tuple[str, str]] = []
        self._consumer.subscribe([f"{name}-counts", f"{name}-joined"])

    def read(self) -> None:
        """Read what there is within a second."""
        for message in self._consumer.consume(10_000, 1.0):
            key, value = message.key(), message.value()
            assert key is not None
            assert value is not None
            if str(message.topic()).endswith("-counts"):
                self.counts[key.decode()].append(int(value))
            else:
                self.joined.append((key.decode(), value.decode()))

    def words_counted(self) -> int:
        return sum(map(len, self.counts.values()))

    def close(self) -> None:
        self._consumer.close()


def test_each_record_has_its_effect_exactly_once(cluster: ProcessCluster, tmp_path: Path) -> None:
    name = cluster.new_group()
    topics = [f"{name}-{each}" for each in ("lines", "left", "right", "counts", "joined")]
    for topic in topics:
        cluster.run("topic", "create", topic, "--partitions", str(PARTITIONS), "--replication-factor", "3")
    inputs, output = Inputs(cluster, name), Output(cluster, name)
    try:
        inputs.write(0)
        with application(cluster, name, tmp_path / "first"):
            _until(output, LINES // 8)
            inputs.write(1)
        owner = next(each["name"] for each in cluster.processes("broker"))
        # The state is lost with the machine: it comes back from the changelogs, which are compacted topics.
        with application(cluster, name, tmp_path / "second"):
            inputs.write(2)
            cluster.kill(owner)
            _until(output, LINES * 2)
            cluster.restart(owner)
        output.read()
    finally:
        output.close()
    words = [word for number in range(LINES) for word in line(number).split()]
    assert output.counts == {word: list(range(1, words.count(word) + 1)) for word in words}
    assert sorted(output.joined) == sorted((str(number), f"l{number}+r{number}") for number in range(PAIRS))


def _until(output: Output, words: int) -> None:
    def has_enough() -> bool:
        output.read()
        return output.words_counted() >= words and (words < LINES or len(output.joined) >= PAIRS)

    _wait(has_enough, lambda: f"{output.words_counted()} of {words} words, {len(output.joined)} pairs in {TIMEOUT_S} s")
