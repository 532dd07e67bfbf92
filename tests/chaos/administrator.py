"""A client that creates, extends, configures and deletes its own topics, and finally compares them with the cluster's."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from chaos.client import Client
from chaos.history import Recorder

_TOPICS_MAX: Final = 5
_PARTITIONS_MAX: Final = 4
_TIMEOUT_S: Final = 15.0
_PAUSE_S: Final = 0.5


class Administrator(Client):
    """Changes topics. A topic with a change of unknown outcome is no longer checked: the change may still take effect."""

    def __init__(self, name: str, recorder: Recorder, bootstrap: str, *, seed: int) -> None:
        super().__init__(name, recorder)
        self._bootstrap = bootstrap
        self._random = random.Random(seed)
        self._made = 0
        self.present: dict[str, int] = {}
        """The number of partitions of every topic that certainly exists."""
        self.deleted: set[str] = set()

    def run_session(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._bootstrap, "log_level": 0})
        while not self.stopping.is_set():
            change = self._random.choice([self._create, self._grow, self._configure, self._delete])
            change(admin)
            self.stopping.wait(self._random.expovariate(1) * _PAUSE_S)

    def final_problems(self, bootstrap: str) -> Sequence[str]:
        """Return problems: missing topics, topics that should be deleted, and wrong numbers of partitions."""
        topics = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}).list_topics(timeout=60).topics
        return wrong_topics({name: len(topic.partitions) for name, topic in topics.items()}, self.present, self.deleted)

    def _create(self, admin: AdminClient) -> None:
        if len(self.present) == _TOPICS_MAX:
            return
        self._made += 1
        name, partitions = f"side-{self._made}", self._random.randint(1, 2)
        if self._is_done(lambda: admin.create_topics([NewTopic(name, partitions, 3)], request_timeout=_TIMEOUT_S)):
            self.present[name] = partitions

    def _grow(self, admin: AdminClient) -> None:
        name = self._any()
        if name is None or self.present[name] == _PARTITIONS_MAX:
            return
        partitions = self.present.pop(name) + 1
        if self._is_done(lambda: admin.create_partitions([NewPartitions(name, partitions)], request_timeout=_TIMEOUT_S)):
            self.present[name] = partitions

    def _configure(self, admin: AdminClient) -> None:
        name = self._any()
        if name is None:
            return
        retention_ms = str(self._random.randint(60_000, 600_000))
        entry = ConfigEntry("retention.ms", retention_ms, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
        self._is_done(lambda: admin.incremental_alter_configs([resource], request_timeout=_TIMEOUT_S))

    def _delete(self, admin: AdminClient) -> None:
        name = self._any()
        if name is None:
            return
        del self.present[name]
        if self._is_done(lambda: admin.delete_topics([name], request_timeout=_TIMEOUT_S)):
            self.deleted.add(name)

    def _any(self) -> str | None:
        return self._random.choice(sorted(self.present)) if self.present else None

    def _is_done(self, begin: Callable[[], Mapping[Any, Future[Any]]]) -> bool:
        """Make a change; return whether it certainly took effect."""
        try:
            for future in begin().values():
                future.result(2 * _TIMEOUT_S)
        except (KafkaException, TimeoutError):
            return False
        return True


def wrong_topics(found: Mapping[str, int], present: Mapping[str, int], deleted: set[str]) -> list[str]:
    """Return the problems with the topics ``found`` (partitions by name), a line each."""
    lost = [f"topic {name} was created and is missing" for name in sorted(present.keys() - found.keys())]
    back = [f"topic {name} was deleted and still exists" for name in sorted(deleted & found.keys())]
    grown = [
        f"topic {name} has {found[name]} partitions and should have {partitions}"
        for name, partitions in sorted(present.items())
        if found.get(name, partitions) != partitions
    ]
    return [*lost, *back, *grown]
