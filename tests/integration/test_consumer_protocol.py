"""Java's client and librdkafka as members of one group of the consumer protocol (KIP-848), whose coordinator is killed."""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from confluent_kafka import Consumer, TopicPartition
from integration.process_cluster import ProcessCluster

from stratalog_loadgen import java_tools

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("java_tools")]
TIMEOUT_S = 60.0
PARTITIONS = 6
TOOLS = "org.apache.kafka.tools.consumer."


@contextmanager
def console_consumer(cluster: ProcessCluster, topic: str, group: str) -> Iterator[queue.SimpleQueue[str]]:
    """Run Kafka's console consumer; yield the values that it prints."""
    values: queue.SimpleQueue[str] = queue.SimpleQueue()
    arguments = ("--bootstrap-server", cluster.bootstrap, "--topic", topic, "--group", group, "--from-beginning")
    property_ = ("--command-property", "group.protocol=consumer")
    command = java_tools.java(TOOLS + "ConsoleConsumer", *arguments, *property_, heap="256m")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def follow() -> None:
            for line in lines:
                values.put(line.strip())

        reading = threading.Thread(target=follow)
        reading.start()
        try:
            yield values
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)
            reading.join(TIMEOUT_S)


def described(cluster: ProcessCluster, group: str, what: str, expected: str) -> re.Match[str]:
    """Describe the group with Kafka's tool until the output matches; return the match."""
    arguments = ("--bootstrap-server", cluster.bootstrap, "--describe", "--group", group, what, "--verbose")
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        output = java_tools.run_tool(TOOLS + "group.ConsumerGroupCommand", *arguments)
        found = re.search(expected, output)
        if found is not None:
            return found
        assert time.monotonic() < deadline, output


def test_members_only_retry_when_their_coordinator_is_killed(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(partitions=PARTITIONS), cluster.new_group()
    cluster.fill(topic, *map(str, range(60)))
    revoked: list[TopicPartition] = []
    member = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap, "group.id": group, "group.protocol": "consumer",
            "group.remote.assignor": "range", "auto.offset.reset": "earliest",
        }
    )  # fmt: skip
    seen: set[str] = set()
    with closing(member), console_consumer(cluster, topic, group) as printed:
        member.subscribe([topic], on_revoke=lambda _, partitions: revoked.extend(partitions))

        def poll_until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + TIMEOUT_S
            while not condition():
                assert time.monotonic() < deadline, f"{len(seen)} values, {member.assignment()}"
                for message in member.consume(100, timeout=0.1):
                    assert message.error() is None, message.error()
                    seen.add((message.value() or b"").decode())
                while not printed.empty():
                    seen.add(printed.get())

        poll_until(lambda: len(member.assignment()) == PARTITIONS // 2 and len(seen) == 60)
        stable = rf"{group}\s+\S+\s+\((\d+)\)\s+range\s+Stable\s+(\d+)\s+\2\s+2"
        found = described(cluster, group, "--state", stable)
        described(
            cluster, group, "--members", rf"(?s){group}\s.*{topic}:0,1,2.*{group}\s.*{topic}:3,4,5|{topic}:3,4,5.*{topic}:0,1,2"
        )
        revoked.clear()
        coordinator = f"broker-{found[1]}"
        cluster.kill(coordinator)
        try:
            cluster.fill(topic, *map(str, range(60, 120)))
            poll_until(lambda: len(seen) == 120)
            assert revoked == [], "members, epochs and assignments are in the log"
            described(cluster, group, "--state", rf"{group}\s.*Stable\s+{found[2]}\s+{found[2]}\s+2")
        finally:
            cluster.restart(coordinator)
