"""Values for requests that make sense: topics, partitions, groups, members, epochs and offsets that exist, or almost.

One value in ten is next to what exists: an unknown name, a partition too many, a stale epoch. Nothing is malformed.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final
from uuid import UUID

from stratalog_broker.partitions.internal_topics import INTERNAL_TOPICS
from stratalog_core.batches.records import Record, build_batch
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Topic
from stratalog_metadata.topic_rules.config_keys import ConfigKind
from stratalog_metadata.topic_rules.topic_configs import TOPIC_CONFIG_KEYS

NAMES: Final = ("flights", "trains", "ships", "busses")
GROUPS: Final = ("readers", "writers", "others")
PARTITIONS_MAX: Final = 6
_STRANGE: Final = 0.1
_COMPRESSIONS: Final = 5
_MS: Final = datetime.timedelta(milliseconds=1)
_LARGE: Final = 1_000_000_000


@dataclass(slots=True)
class Learned:
    """Values from responses: members with their generations, and producer ids."""

    members: list[tuple[str, int]] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)

    def take(self, response: Any) -> None:
        """Remember the member or producer that an answer names."""
        member_id, generation = getattr(response, "member_id", ""), getattr(response, "generation_id", -1)
        if member_id:
            self.members = [*self.members[-7:], (member_id, generation)]
        if getattr(response, "producer_id", -1) >= 0:
            self.producers = [*self.producers[-3:], response.producer_id]


class Values:
    """Draws for one request after the other (see ``fuzz.kafka_requests.Draw``)."""

    def __init__(self, random: Random, view: MetadataView, learned: Learned, *spared: str) -> None:
        self._random = random
        self._view = view
        self._learned = learned
        self._spared = spared
        self._topic: Topic | None = None
        self._config = ""
        self._by_field: dict[str, Callable[[], Any]] = {
            "topic": self._topic_name, "topic_name": self._topic_name, "topic_names": self._topic_name,
            "topic_id": self._topic_id,
            "partition": self._partition, "partition_index": self._partition, "partition_indexes": self._partition,
            "partitions": self._partition, "index": self._partition,
            "group_id": self._group, "groups": self._group, "groups_names": self._group, "key": self._group,
            "coordinator_keys": self._group,
            "member_id": self._member, "generation_id": self._generation, "generation_id_or_member_epoch": self._generation,
            "group_instance_id": lambda: random.choice(("instance-1", "instance-2")),
            "protocol_type": lambda: "consumer", "protocol_name": lambda: "range",
            "producer_id": lambda: random.choice([-1, *learned.producers]),
            "producer_epoch": lambda: random.choice((-1, 0)),
            "transactional_id": lambda: "transactional",
            "resource_type": lambda: random.choice((2, 2, 4, 4, 8, 16, 32)), "resource_name": self._resource,
            "resource_types": lambda: random.choice((2, 4, 8, 16, 32)),
            "feature": lambda: "group.version", "max_version_level": lambda: random.choice((0, 1, 2)),
            "upgrade_type": lambda: random.choice((1, 2, 3)), "compression_type": lambda: random.randrange(6),
            "config_operation": lambda: random.randrange(4), "configuration_keys": self._config_name,
            "value": self._config_value,
            "num_partitions": lambda: random.choice((-1, 1, 2, 3)), "replication_factor": lambda: random.choice((-1, 1, 1, 2)),
            "count": lambda: random.randint(1, PARTITIONS_MAX), "broker_ids": lambda: 1,
            "replicas": lambda: random.choice((1, 1, 1, 9)),
            "election_type": lambda: random.randrange(2),
            "acks": lambda: random.choice((-1, -1, 1, 0)), "records": self._records,
            "offset": self._offset, "fetch_offset": self._offset, "committed_offset": self._offset,
            "log_start_offset": lambda: -1, "high_watermark": lambda: -1,
            "current_leader_epoch": self._epoch, "leader_epoch": self._epoch, "last_fetched_epoch": self._epoch,
            "committed_leader_epoch": self._epoch, "member_epoch": lambda: -1, "replica_epoch": lambda: -1,
            "timestamp": lambda: random.choice((-1, -2, -3, -4, -5, -6, 0, 1_000, _LARGE)),
            "replica_id": lambda: -1, "session_id": lambda: 0, "session_epoch": lambda: random.choice((-1, 0)),
            "max_bytes": lambda: random.choice((1, 1_000, _LARGE)),
            "partition_max_bytes": lambda: random.choice((1, 1_000, _LARGE)),
            "min_bytes": lambda: random.choice((0, 1)), "isolation_level": lambda: random.randrange(2),
            "key_type": lambda: random.choice((0, 0, 0, 1)), "endpoint_type": lambda: 1,
            "max_wait": lambda: random.randrange(50) * _MS, "timeout": lambda: 2_000 * _MS,
            "session_timeout": lambda: 500 * _MS, "rebalance_timeout": lambda: 300 * _MS, "retention_time": lambda: -1 * _MS,
            "transaction_timeout": lambda: 1_000 * _MS, "response_partition_limit": lambda: random.choice((1, 3, 2_000)),
            "states_filter": lambda: random.choice(("Stable", "Empty")), "types_filter": lambda: "Classic",
            "allow_auto_topic_creation": lambda: random.random() < 0.5, "validate_only": lambda: random.random() < 0.2,
            "replica_directory_id": lambda: UUID(int=0), "rack_id": lambda: "", "cluster_id": lambda: "",
        }  # fmt: skip

    def value(self, owner: str, field: str, kafka_type: str) -> Any:
        if field == "name":
            return self._name(owner)
        draw = self._by_field.get(field)
        return draw() if draw is not None else _BY_TYPE[kafka_type](self._random)

    def elements(self, owner: str, field: str) -> int:
        return self._random.choice((0, 1, 1, 1, 2, 3))

    def is_null(self, owner: str, field: str) -> bool:
        return field in ("transactional_id", "replica_state") or self._random.random() < 0.3

    @property
    def _is_strange(self) -> bool:
        return self._random.random() < _STRANGE

    def _name(self, owner: str) -> str:
        if "Config" in owner:
            return self._config_name()
        if owner == "JoinGroupRequestProtocol":
            return self._random.choice(("range", "roundrobin"))
        return self._topic_name()

    def _topics(self) -> list[Topic]:
        return [topic for topic in self._view.all(Topic) if topic.name not in self._spared]

    def _topic_name(self) -> str:
        topics = self._topics()
        if self._is_strange or not topics:
            self._topic = None
            return self._random.choice((*NAMES, *sorted(INTERNAL_TOPICS)))
        self._topic = self._random.choice(topics)
        return self._topic.name

    def _topic_id(self) -> UUID:
        topics = self._topics()
        if self._is_strange or not topics:
            return UUID(int=self._random.getrandbits(128))
        self._topic = self._random.choice(topics)
        return self._topic.topic_id

    def _partition(self) -> int:
        count = self._topic.partition_count if self._topic is not None else 1
        return count if self._is_strange else self._random.randrange(count)

    def _group(self) -> str:
        return self._random.choice(GROUPS)

    def _member(self) -> str:
        members = [member_id for member_id, _ in self._learned.members]
        return self._random.choice(["", *members])

    def _generation(self) -> int:
        generations = [generation for _, generation in self._learned.members]
        return self._random.choice([-1, *generations])

    def _offset(self) -> int:
        return self._random.choice((-1, 0, 0, 1, 2, 5, self._random.randrange(100)))

    def _epoch(self) -> int:
        return self._random.choice((-1, -1, 0, 1, 2))

    def _resource(self) -> str:
        return self._random.choice(("", "1", self._topic_name(), self._topic_name()))

    def _config_name(self) -> str:
        self._config = self._random.choice(list(TOPIC_CONFIG_KEYS))
        return self._config

    def _config_value(self) -> str:
        key = TOPIC_CONFIG_KEYS.get(self._config)
        if key is None or key.is_fixed or key.choices is not None or key.kind not in (ConfigKind.INT, ConfigKind.LONG):
            return "" if key is None else self._random.choice(key.choices) if key.choices and not key.is_fixed else key.default
        least = key.minimum or 0
        return str(self._random.choice((least, least + 1, int(key.default))))

    def _records(self) -> bytes:
        producer_id = self._random.choice([-1, -1, *self._learned.producers])
        records = [
            Record(offset=number, timestamp_ms=1_000 + number, key=self._content(), value=self._content())
            for number in range(self._random.randint(1, 3))
        ]
        numbers = {"producer_epoch": 0, "base_sequence": self._random.choice((0, 0, 1, 3))} if producer_id >= 0 else {}
        compression = self._random.randrange(_COMPRESSIONS)
        return bytes(build_batch(records, compression=compression, producer_id=producer_id, **numbers))

    def _content(self) -> bytes | None:
        """Also what a coordinator would read as the beginning of a key or value of its own."""
        kind = self._random.randrange(4)
        if kind == 0:
            return None
        return self._random.randbytes(self._random.randrange(40)) if kind == 1 else b"\x00\x01\x00\x07readers" * (kind - 1)


_BY_TYPE: Final[dict[str, Callable[[Random], Any]]] = {
    "int8": lambda random: random.randrange(3),
    "int16": lambda random: random.randrange(3),
    "int32": lambda random: random.randrange(3),
    "int64": lambda random: random.randrange(3),
    "bool": lambda random: random.random() < 0.5,
    "string": lambda random: random.choice(("", "text")),
    "bytes": lambda random: random.randbytes(random.randrange(20)),
    "uuid": lambda random: UUID(int=random.getrandbits(128)),
    "timedelta_i32": lambda random: random.randrange(100) * _MS,
    "timedelta_i64": lambda random: random.randrange(100) * _MS,
}
