"""The suites: each is unmodified software of others that runs on a cluster and reports the outcome of each step."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ecosystem import connect, kafka_python, kcat, mirror, programs, registry, serializers
from ecosystem.clusters import BROKERS

from stratalog_loadgen.java_tools import KAFKA_VERSION

_PROGRAM_TIMEOUT_S: Final = 600
Outcomes = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """``run`` takes a bootstrap address, a prefix of all names and an empty directory; it returns the outcomes by step.

    ``reasons`` has the steps whose outcome differs from Apache Kafka's on purpose. The cluster has ``brokers`` brokers.
    """

    software: str
    version: str
    run: Callable[[str, str, Path], Outcomes]
    reasons: Mapping[str, str] = field(default_factory=dict)
    brokers: int = BROKERS


def _program(build: Callable[[], list[str]]) -> Callable[[str, str, Path], Outcomes]:
    def run(bootstrap: str, prefix: str, _: Path) -> Outcomes:
        done = subprocess.run(
            [*build(), bootstrap, prefix],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROGRAM_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-3000:]}"
        return dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)

    return run


SUITES: Final = {
    "franz-go": Suite(
        software="franz-go (Go)",
        version=programs.GO_MODULES["github.com/twmb/franz-go"],
        run=_program(lambda: programs.go_program("franz")),
    ),
    "sarama": Suite(
        software="sarama (Go)",
        version=programs.GO_MODULES["github.com/IBM/sarama"],
        run=_program(lambda: programs.go_program("sarama")),
    ),
    "kafka-go": Suite(
        software="kafka-go (Go)",
        version=programs.GO_MODULES["github.com/segmentio/kafka-go"],
        run=_program(lambda: programs.go_program("kafkago")),
    ),
    "kafkajs": Suite(
        software="KafkaJS (JavaScript)",
        version=programs.NODE_PACKAGES["kafkajs"]["kafkajs"],
        run=_program(lambda: programs.node_program("kafkajs")),
    ),
    "confluent-javascript": Suite(
        software="@confluentinc/kafka-javascript",
        version=programs.NODE_PACKAGES["confluent"]["@confluentinc/kafka-javascript"],
        run=_program(lambda: programs.node_program("confluent")),
    ),
    "rdkafka": Suite(software="rdkafka (Rust)", version=programs.CRATES["rdkafka"][0], run=_program(programs.rust_program)),
    "java": Suite(software="Java, consumer protocol", version=KAFKA_VERSION, run=_program(programs.java_program)),
    "kcat": Suite(software="kcat", version="1.7.1 (Debian)", run=kcat.run),
    "connect": Suite(software="Kafka Connect, distributed", version=KAFKA_VERSION, run=connect.run),
    "mirror-maker": Suite(
        software="MirrorMaker 2",
        version=KAFKA_VERSION,
        run=mirror.run,
        reasons={"ask for ACLs": "no ACLs are served; MirrorMaker logs an error and copies everything else"},
    ),
    "apicurio": Suite(software="Apicurio Registry", version=programs.APICURIO_VERSION, run=registry.run),
    "serializers": Suite(
        software="confluent-kafka's serializers, Apicurio Registry and Spark",
        version=programs.CONFLUENT_PYTHON_VERSION,
        run=serializers.run,
    ),
    "kafka-python": Suite(
        software="kafka-python's own integration tests",
        version=programs.KAFKA_PYTHON_VERSION,
        run=kafka_python.run,
        brokers=1,
        reasons={
            "admin: create describe delete acls": "no ACLs are served; Apache Kafka without an authorizer refuses them, too",
            "admin: alter replica log dirs": "brokers hold no data, so there is no directory to move a partition to",
        },
    ),
}
