"""Java's client and librdkafka in groups of the consumer protocol (KIP-848), whose coordinator is killed.

Java's clients of both protocols in one group, which is upgraded and downgraded while records are written.
"""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from confluent_kafka import Consumer, ConsumerGroupType, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from integration.process_cluster import ProcessCluster

from stratalog_core.kafka_clients import as_ours, retried
from stratalog_loadgen import java_tools

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("java_tools")]
TIMEOUT_S = 120.0
PARTITIONS = 6
TOOLS = "org.apache.kafka.tools.consumer."


@contextmanager
def console_consumer(
    cluster: ProcessCluster, topic: str, group: str, protocol: str = "consumer"
) -> Iterator[queue.SimpleQueue[str]]:
    """Run Kafka's console consumer; yield the values that it prints. At the end it commits, and leaves the group."""
    values: queue.SimpleQueue[str] = queue.SimpleQueue()
    arguments = ("--bootstrap-server", cluster.bootstrap, "--topic", topic, "--group", group, "--from-beginning")
    property_ = ("--command-property", f"group.protocol={protocol}")
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
    arguments = (
        "--bootstrap-server",
        cluster.bootstrap,
        "--timeout",
        "120000",
        "--describe",
        "--group",
        group,
        what,
        "--verbose",
    )
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        output = java_tools.run_tool(TOOLS + "group.ConsumerGroupCommand", *arguments)
        found = re.search(expected, output)
        if found is not None:
            return found
        assert time.monotonic() < deadline, output


class PolledMember:
    """A consumer that a thread polls all the time: only in a poll does it give partitions back, which others wait for.

    No other thread may call it meanwhile: ``Consumer.assignment`` waits without releasing the interpreter, which ``on_revoke``
    needs.
    """

    def __init__(self, cluster: ProcessCluster, topic: str, group: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap, "group.id": group, "group.protocol": "consumer",
                "group.remote.assignor": "range", "auto.offset.reset": "earliest",
            }
        )  # fmt: skip
        self.values: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: list[str] = []
        self.revoked: list[TopicPartition] = []
        self.assignment: list[TopicPartition] = []
        self._is_closing = threading.Event()
        self._consumer.subscribe([topic], on_revoke=lambda _, partitions: self.revoked.extend(partitions))
        self._polling = threading.Thread(target=self._poll)
        self._polling.start()

    def _poll(self) -> None:
        while not self._is_closing.is_set():
            for message in self._consumer.consume(100, timeout=0.1):
                if message.error() is not None:
                    self.errors.append(str(message.error()))
                else:
                    self.values.put((message.value() or b"").decode())
            self.assignment = self._consumer.assignment()

    def close(self) -> None:
        self._is_closing.set()
        self._polling.join()
        self._consumer.close()


@pytest.mark.timeout(600)
def test_members_only_retry_when_their_coordinator_is_killed(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(partitions=PARTITIONS), cluster.new_group()
    cluster.fill(topic, *map(str, range(60)))
    seen: set[str] = set()
    with closing(PolledMember(cluster, topic, group)) as member, console_consumer(cluster, topic, group) as printed:

        def wait_until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + TIMEOUT_S
            while not condition():
                assert time.monotonic() < deadline, f"{len(seen)} values, {member.assignment}"
                assert member.errors == []
                for values in (member.values, printed):
                    while not values.empty():
                        seen.add(values.get())
                time.sleep(0.05)

        wait_until(lambda: len(member.assignment) == PARTITIONS // 2 and len(seen) == 60)
        stable = rf"{group}\s+\S+\s+\((\d+)\)\s+range\s+Stable\s+(\d+)\s+\2\s+2"
        found = described(cluster, group, "--state", stable)
        described(
            cluster, group, "--members", rf"(?s){group}\s.*{topic}:0,1,2.*{group}\s.*{topic}:3,4,5|{topic}:3,4,5.*{topic}:0,1,2"
        )
        member.revoked.clear()
        coordinator = f"broker-{found[1]}"
        cluster.kill(coordinator)
        try:
            cluster.fill(topic, *map(str, range(60, 120)))
            wait_until(lambda: len(seen) == 120)
            described(cluster, group, "--state", rf"{group}\s.*Stable\s+{found[2]}\s+{found[2]}\s+2")
            assert member.revoked == [], "members, epochs and assignments are in the log"
        finally:
            cluster.restart(coordinator)


class Traffic:
    """Writes numbered records to all partitions while a test runs, and reads the group's offsets, which may not move back."""

    def __init__(self, cluster: ProcessCluster, topic: str, group: str) -> None:
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True})
        self._observer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, "enable.auto.commit": False})
        self._topic = topic
        self.offsets = [0] * PARTITIONS
        self.sent = 0

    def go_on(self, count: int = 20) -> None:
        for number in range(self.sent, self.sent + count):
            self._producer.produce(self._topic, str(number), partition=number % PARTITIONS)
        assert self._producer.flush(TIMEOUT_S) == 0
        self.sent += count
        places = [TopicPartition(self._topic, index) for index in range(PARTITIONS)]
        # Partitions of __consumer_offsets move whenever brokers are balanced, as after the restart in the test before.
        rows = retried(lambda: self._observer.committed(places, TIMEOUT_S), TIMEOUT_S)
        assert [row.error for row in rows] == [None] * PARTITIONS
        found = [max(row.offset, 0) for row in rows]
        assert all(after >= before for before, after in zip(self.offsets, found, strict=True)), (self.offsets, found)
        self.offsets = found

    def close(self) -> None:
        self._observer.close()


def listed_type(admin: AdminClient, group: str) -> ConsumerGroupType | None:
    """Return the group's type, once all coordinators list their groups."""

    def once() -> ConsumerGroupType | None:
        found = admin.list_consumer_groups().result(TIMEOUT_S)
        for failure in found.errors:
            raise as_ours(failure)
        return {row.group_id: row.type for row in found.valid}.get(group)

    return retried(once, TIMEOUT_S)


def test_a_group_changes_its_protocol_and_back_while_records_are_written(cluster: ProcessCluster) -> None:
    topic, group = cluster.new_topic(partitions=PARTITIONS), cluster.new_group()
    seen: set[str] = set()
    queues: list[queue.SimpleQueue[str]] = []
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    with closing(Traffic(cluster, topic, group)) as traffic, ExitStack() as first, ExitStack() as second, ExitStack() as last:

        def join(members: ExitStack, protocol: str) -> None:
            queues.append(members.enter_context(console_consumer(cluster, topic, group, protocol)))

        def read_until(kind: ConsumerGroupType, count: int) -> None:
            """Write until the newest member has read; then the group has this many members, and no record is missing."""
            deadline, has_read = time.monotonic() + TIMEOUT_S, False
            while not has_read or len(seen) < traffic.sent:
                assert time.monotonic() < deadline, (
                    f"{len(seen)} of {traffic.sent} values, the newest member has read: {has_read}"
                )
                if not has_read:
                    traffic.go_on()
                has_read |= not queues[-1].empty()
                for values in queues:
                    while not values.empty():
                        seen.add(values.get())
                time.sleep(0.1)
            described(cluster, group, "--state", rf"{group}\s.*Stable.*\s{count}\b")
            assert listed_type(admin, group) is kind

        join(first, "classic")
        read_until(ConsumerGroupType.CLASSIC, 1)
        join(second, "consumer")
        read_until(ConsumerGroupType.CONSUMER, 2)
        first.close()
        join(last, "classic")
        read_until(ConsumerGroupType.CONSUMER, 2)
        second.close()
        traffic.go_on()
        read_until(ConsumerGroupType.CLASSIC, 1)
