"""Kafka's own ``VerifiableProducer``: Java's idempotent producer with five requests in flight, on its own topic.

It sends 0, 1, 2 … and prints where each record was acknowledged. At the end every acknowledged value must be at its offset, and
no value may be there twice: Java's producer never resends in a new epoch a batch that may have been appended in an old one.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from chaos.client import Client
from chaos.history import Recorder
from chaos.tether import tether_environment, tethered
from stratalog_loadgen.java_tools import java

TOPIC: Final = "java"
PARTITIONS: Final = 2
_STOP_S: Final = 60.0
_READ_S: Final = 120.0
_FIRST_ACK_S: Final = 60.0

_CONFIG: Final = """enable.idempotence=true
max.in.flight.requests.per.connection=5
delivery.timeout.ms=300000
# The tool's own default is 0, which idempotence does not allow.
retries=2147483647
"""

Place = tuple[int, int]
"""Partition and offset."""


class JavaProducer(Client):
    """Runs the tool. One session is one process; each has its own prefix for its values."""

    def __init__(self, name: str, recorder: Recorder, bootstrap: str, directory: Path, *, per_s: int) -> None:
        super().__init__(name, recorder)
        self._bootstrap = bootstrap
        self._per_s = per_s
        self._log = directory / f"{name}.log"
        self._config = directory / f"{name}.properties"
        self._config.write_text(_CONFIG)
        self._sessions = 0
        self.acknowledged: dict[str, Place] = {}

    def run_session(self) -> None:
        self._sessions += 1
        command = java(
            "org.apache.kafka.tools.VerifiableProducer",
            *("--topic", TOPIC, "--bootstrap-server", self._bootstrap, "--acks", "-1"),
            *("--throughput", str(self._per_s), "--value-prefix", str(self._sessions)),
            *("--command-config", str(self._config)),
            heap="128m",
        )
        with (
            self._log.open("ab") as log,
            subprocess.Popen(tethered(command), env=tether_environment(), stdout=subprocess.PIPE, stderr=log) as process,
        ):
            watcher = threading.Thread(target=self._end_with_the_run, args=(process,), daemon=True)
            watcher.start()
            assert process.stdout is not None
            for line in process.stdout:
                self._take(line)
        watcher.join()
        self.stopping.wait(1)

    def final_problems(self, bootstrap: str) -> Sequence[str]:
        """Return acknowledged values that are lost or at another place, and duplicate values."""
        if not self.acknowledged:
            return [f"{self.name} had nothing acknowledged: see {self._log}"]
        return wrong_places(read_places(bootstrap), self.acknowledged)

    def _end_with_the_run(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self.stopping.wait(0.2):
            pass
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.sessions_given_up += 1
            process.kill()

    def _take(self, line: bytes) -> None:
        """Take one line of the tool's output: JSON, or a message for people."""
        try:
            said = json.loads(line)
        except ValueError:
            return
        if said.get("name") == "producer_send_success":
            self.acknowledged[said["value"]] = (said["partition"], said["offset"])


def read_places(bootstrap: str) -> list[tuple[str, Place]]:
    """Return every value of the topic with its place, unordered. Incomplete if the ends are not reached in time."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "java-final", "enable.auto.commit": False, "log_level": 0})
    try:
        partitions = [TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)]
        left = {each.partition: consumer.get_watermark_offsets(each, timeout=30)[1] for each in partitions}
        consumer.assign(partitions)
        found: list[tuple[str, Place]] = []
        deadline = time.monotonic() + _READ_S
        while any(left.values()) and time.monotonic() < deadline:
            for message in consumer.consume(1000, timeout=1):
                if message.error() is None:
                    place = (message.partition() or 0, message.offset() or 0)
                    found.append(((message.value() or b"").decode(), place))
                    if place[1] + 1 >= left[place[0]]:
                        left[place[0]] = 0
        return found
    finally:
        consumer.close()


def wrong_places(found: Iterable[tuple[str, Place]], acknowledged: Mapping[str, Place]) -> list[str]:
    """Return the contradictions to the acknowledgements, a line for each kind with an example."""
    places: dict[str, Place] = {}
    doubled: list[str] = []
    for value, place in found:
        if value in places:
            doubled.append(f"{value} at {places[value]} and {place}")
        places[value] = place
    moved = [
        f"{value} at {places.get(value)} instead of {place}"
        for value, place in acknowledged.items()
        if places.get(value) != place
    ]
    return [
        *([f"Java's producer: {len(doubled)} values are there twice: {doubled[0]}"] if doubled else []),
        *([f"Java's producer: {len(moved)} acknowledged values are lost or elsewhere: {moved[0]}"] if moved else []),
    ]
