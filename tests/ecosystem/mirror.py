"""MirrorMaker 2 between an Apache Kafka of its own and the cluster under test, both ways, with the positions of groups.

A consumer that leaves one cluster for the other goes on where its group was: it skips nothing, and may see some records twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.kafka_control import KafkaCluster
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions
from ecosystem.clusters import control_settings
from ecosystem.connect import class_path
from ecosystem.processes import java, wait, write_properties
from ecosystem.topics import create, fill, read

_RECORDS: Final = 1_000
_POSITION: Final = 400
_CONFIGS: Final = {"retention.ms": "86400000", "max.message.bytes": "2000000", "compression.type": "gzip"}
_CHANGED: Final = _CONFIGS | {"retention.ms": "3600000"}
_ACLS: Final = {"No ACL authorizer is configured": "no authorizer is configured", "caught exception": "not served"}
"""What MirrorMaker logs if there are no ACLs to copy."""


def run(bootstrap: str, name: str, directory: Path) -> dict[str, str]:
    """Mirror a topic each way; return the outcomes by step."""
    with KafkaCluster(directory / "kafka", brokers=1, heap="400m", extra=control_settings(1)) as kafka:
        flows = {"into it": ("kafka", kafka.bootstrap, bootstrap), "from it": ("own", bootstrap, kafka.bootstrap)}
        for source, origin, _ in flows.values():
            topic = f"{name}-of-{source}"
            create(origin, topic, partitions=1, copies=1, configs=_CONFIGS)
            fill(origin, topic, _values())
            _commit(origin, f"{name}-group", topic)
        (directory / "mirror").mkdir()
        settings = directory / "mirror" / "settings"
        clusters = {"kafka": kafka.bootstrap, "own": bootstrap}
        write_properties(settings, _settings(clusters, ["kafka->own", "own->kafka"], f"{name}-.*", f"{name}-group"))
        arguments = ["-cp", class_path(), "org.apache.kafka.connect.mirror.MirrorMaker", str(settings)]
        outcomes: dict[str, str] = {}
        with java(arguments, directory / "mirror") as output:
            outcomes["ask for ACLs"] = _acls(output)
            for way, (source, origin, target) in flows.items():
                outcomes |= _mirrored(way, (origin, f"{name}-of-{source}"), (target, f"{source}.{name}-of-{source}"), output)
            for way, (source, _, target) in flows.items():
                outcomes |= _moved(way, target, f"{source}.{name}-of-{source}", f"{name}-group", output)
        return outcomes | _under_its_own_name(kafka.bootstrap, bootstrap, f"{name}-kept", directory / "one-way")


def _under_its_own_name(kafka: str, own: str, topic: str, directory: Path) -> dict[str, str]:
    """Mirror a topic into the cluster under test by another MirrorMaker, which keeps its name; return the outcomes by step."""
    create(kafka, topic, partitions=1, copies=1, configs=_CONFIGS)
    fill(kafka, topic, _values())
    _commit(kafka, f"{topic}-group", topic)
    directory.mkdir()
    settings = _settings({"old": kafka, "new": own}, ["old->new"], topic, f"{topic}-group") | {
        "new->old.enabled": "false",
        "replication.policy.class": "org.apache.kafka.connect.mirror.IdentityReplicationPolicy",
    }
    write_properties(directory / "settings", settings)
    arguments = ["-cp", class_path(), "org.apache.kafka.connect.mirror.MirrorMaker", str(directory / "settings")]
    with java(arguments, directory) as output:
        way = "under its own name"
        return _mirrored(way, (kafka, topic), (own, topic), output) | _moved(way, own, topic, f"{topic}-group", output)


def _values() -> list[str]:
    return [f"value {number}" for number in range(_RECORDS)]


def _mirrored(way: str, origin: tuple[str, str], target: tuple[str, str], output: Path) -> dict[str, str]:
    """Wait for the copy of a topic; compare records, configs, and partitions that are added."""
    found = [value for _, value in read(*target, _RECORDS)]
    wait(lambda: _configs(*target) == _CONFIGS, output)
    admin = AdminClient({"bootstrap.servers": origin[0], "log_level": 0})
    change = ConfigEntry("retention.ms", _CHANGED["retention.ms"], incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, origin[1], incremental_configs=[change])
    admin.incremental_alter_configs([resource])[resource].result(30)
    wait(lambda: _configs(*target) == _CHANGED, output)
    admin.create_partitions([NewPartitions(origin[1], 2)])[origin[1]].result(30)
    wait(lambda: _partitions(*target) == 2, output)
    return {
        f"mirror a topic {way}": f"{len(found)} records{' in order' if found == _values() else ''}",
        f"mirror its configs {way}": "the same",
        f"mirror a change of its configs {way}": "the same",
        f"mirror a new partition {way}": "added",
    }


def _acls(output: Path) -> str:
    """Return what MirrorMaker found when it wanted to copy the ACLs of the cluster under test."""
    thread = "[Scheduler for MirrorSourceConnector: own->kafka|MirrorSourceConnector-syncing topic ACLs]"

    def found() -> list[str]:
        lines = [line for line in output.read_text().splitlines() if line.startswith(thread)]
        return [outcome for line in lines for text, outcome in _ACLS.items() if text in line]

    wait(lambda: bool(found()), output)
    return found()[0]


def _moved(way: str, target: str, topic: str, group: str, output: Path) -> dict[str, str]:
    """Wait for the group's position on the other cluster, and read from there."""
    wait(lambda: _position(target, group, topic) > 0, output)
    position = _position(target, group, topic)
    found = [value for _, value in read(target, topic, _RECORDS - position, group=group)]
    rest = found == _values()[position:]
    return {f"move a group {way}": "skips nothing" if rest and position <= _POSITION else f"at {position}, reads {len(found)}"}


def _configs(bootstrap: str, topic: str) -> dict[str, str]:
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    found = admin.describe_configs([resource])[resource].result(30)
    return {name: str(entry.value) for name, entry in found.items() if name in _CONFIGS}


def _partitions(bootstrap: str, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    return len(admin.list_topics(topic, 30).topics[topic].partitions)


def _commit(bootstrap: str, group: str, topic: str) -> None:
    """Commit a position as a consumer: MirrorMaker passes over groups that never had one."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    try:
        consumer.subscribe([topic])
        assert consumer.consume(1, 60)
        consumer.commit(offsets=[TopicPartition(topic, 0, _POSITION)], asynchronous=False)
    finally:
        consumer.close()


def _position(bootstrap: str, group: str, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    request = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
    answer = admin.list_consumer_group_offsets([request])[group].result(30)
    return max((int(each.offset) for each in answer.topic_partitions), default=-1)


def _settings(clusters: Mapping[str, str], flows: Sequence[str], topics: str, group: str) -> dict[str, str]:
    """Return the defaults, with intervals of a second in place of minutes, and one copy, since the control has one broker.

    ``clusters`` are bootstrap addresses by the names that ``flows`` use.
    """
    seconds = ("emit.checkpoints", "sync.group.offsets", "sync.topic.configs", "refresh.topics", "refresh.groups")
    flow = {
        "enabled": "true", "topics": topics, "groups": group, "sync.group.offsets.enabled": "true",
        "offset.lag.max": "0", **{f"{each}.interval.seconds": "1" for each in seconds},
    }  # fmt: skip
    topic_kinds = ("offset-syncs", "checkpoints", "heartbeats")
    kinds = ("offset.storage", "config.storage", "status.storage", *(f"{kind}.topic" for kind in topic_kinds))
    return {
        "clusters": ", ".join(clusters),
        **{f"{alias}.bootstrap.servers": bootstrap for alias, bootstrap in clusters.items()},
        "replication.factor": "1",
        **{f"{kind}.replication.factor": "1" for kind in kinds},
        **{f"{source}.{key}": value for source in flows for key, value in flow.items()},
    }
