"""Creates, extends, truncates, deletes and restores topics during other faults.

An administrator creates topics (some with a short retention, some of those never copied to the store), adds partitions,
deletes records, deletes topics and restores them, each with its own idempotent producer. Checked at the end: the remaining
records of a topic are contiguous and were sent; no acknowledged record is missing unless DeleteRecords or retention may have
removed it; and nothing is left of a deleted topic.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from simulation.checkers.coverage import MARKED_LATE, RECORDS_DELETED, TOPIC_RESTORED
from simulation.checkers.log_truth import Truth, read_all
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.clients.producers import Producer
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import LATER_S, Bucket
from stratalog_broker.admin.deleted_topics import undelete
from stratalog_core.errors import StratalogError
from stratalog_metadata.records import DeletedTopic, Record, Topic, restored_topic_key, topic_key
from stratalog_tiering.format.object_keys import deleted_topic_of, deletion_marker_key

TOPICS_MAX: Final = 3
PAUSE_MEAN_S: Final = 1.0
RETENTION_MS: Final = 3_000
UNCOPIED_SHARE: Final = 0.5
"""Share of the topics with a short retention whose records expire on bookies, and never reach the store."""
AGAIN_SHARE: Final = 0.5
"""Share of restored topics that are deleted again at once, perhaps before the bucket shows the restore."""
LOOK_S: Final = 0.05
LATE_S: Final = 10 * LATER_S
CLOCK_MARGIN: Final = 0.8
"""Clocks run up to 2 % apart, and batches get their timestamps before they are sent."""


class TopicTruth(Truth):
    """Records sent to one topic with their times, and the requested deletions."""

    def __init__(self, world: World) -> None:
        assert world.audit is not None
        super().__init__(world.audit, world.coverage)
        self._world = world
        self._sent_at_s: dict[bytes, float] = {}
        self.deleted_to: dict[int, int] = {}
        """By partition: deletion of records below this offset was requested, whatever the outcome."""

    def send(self, values: Sequence[bytes]) -> None:
        super().send(values)
        self._sent_at_s.update(dict.fromkeys(values, self._world.loop.time()))

    def check_start(self, partition: int, start: int, retention_ms: int | None) -> None:
        """Assert that every acknowledged record below ``start`` was deleted on request or had expired."""
        expired_s = self._world.loop.time() - (retention_ms or 0) / 1000 * CLOCK_MARGIN
        for (where, offset), value in self.acknowledged.items():
            if where == partition and self.deleted_to.get(partition, 0) <= offset < start:
                is_expired = retention_ms is not None and self._sent_at_s[value] <= expired_s
                assert is_expired, f"{value!r} at {partition}@{offset} is gone; the log begins at {start}"


@dataclass(slots=True)
class AdministeredTopic:
    name: str
    partitions: int
    retention_ms: int | None
    truth: TopicTruth
    producer: Producer
    machine: Machine
    topic_id: UUID | None
    is_created_once: bool
    """One request created the topic. Of several, another may be carried out after the topic was deleted."""
    is_deleted: bool = False

    def may_be(self, found: Topic) -> bool:
        """Return whether the topic ``found``, which has this one's name, is this one."""
        return self.is_created_once or found.topic_id == self.topic_id


class Administrator:
    """Works until ``stop`` is set; ``stopped`` is set when its last request has been answered."""

    def __init__(self, world: World, bootstrap: list[str]) -> None:
        self._world = world
        self._bootstrap = bootstrap
        self.topics: list[AdministeredTopic] = []
        self.stop = False
        self.stopped = asyncio.Event()

    @property
    def _records(self) -> Mapping[str, Record]:
        """The quorum's records."""
        assert self._world.audit is not None
        return self._world.audit.records

    @property
    def live(self) -> list[AdministeredTopic]:
        return [topic for topic in self.topics if not topic.is_deleted]

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        turn = 0
        while not self.stop:
            turn += 1
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))
            if self._world.decides(f"{machine.name}#{turn}"):
                await self._step(client, ports)
        self.stopped.set()
        await asyncio.Event().wait()

    async def _step(self, client: KafkaClient, ports: Ports) -> None:
        if not self.live or (len(self.live) < TOPICS_MAX and ports.random.random() < 0.3):
            await self._create(client, ports)
            return
        topic = ports.random.choice(self.live)
        acts = [self._delete_records, self._delete_records, self._grow, self._delete, self._restore, self._restore]
        await ports.random.choice(acts)(client, ports, topic)

    async def _create(self, client: KafkaClient, ports: Ports) -> None:
        name = f"topic-{len(self.topics)}"
        partitions, retention_ms = ports.random.choice([1, 2]), ports.random.choice([None, RETENTION_MS])
        configs = {"segment.ms": "400", "retention.ms": str(retention_ms or -1), "message.timestamp.after.max.ms": "86400000"}
        if retention_ms is not None and self._world.random(f"copying {name}").random() < UNCOPIED_SHARE:
            configs["remote.storage.enable"] = "false"
        truth = TopicTruth(self._world)
        producer = Producer(self._world, truth, f"{name}.p", name, partitions, self._bootstrap)
        machine = Machine(self._world, f"producer-{name}", producer.run)
        is_created_once = await self._until(
            lambda: self._partitions(name) > 0,
            lambda: client.create_topic(name, partitions, 3, configs, ports.random.choice(self._bootstrap)),
        )
        found = self._found(name)
        topic_id = found.topic_id if found is not None else None
        topic = AdministeredTopic(name, partitions, retention_ms, truth, producer, machine, topic_id, is_created_once)
        self.topics.append(topic)
        self._world.note(f"{name} is created, {partitions} partitions, retention {retention_ms}")
        machine.boot()

    async def _grow(self, client: KafkaClient, ports: Ports, topic: AdministeredTopic) -> None:
        count = topic.partitions + 1
        await self._until(lambda: self._partitions(topic.name) >= count, lambda: client.create_partitions(topic.name, count))
        topic.partitions = count
        topic.producer.add_partition()
        self._world.note(f"{topic.name} has {topic.partitions} partitions")

    async def _delete_records(self, client: KafkaClient, ports: Ports, topic: AdministeredTopic) -> None:
        partition = ports.random.randrange(topic.partitions)
        offset = ports.random.randrange(topic.truth.ends.get(partition, 0) + 1)
        topic.truth.deleted_to[partition] = max(offset, topic.truth.deleted_to.get(partition, 0))
        if await self._answer(client.delete_records(topic.name, partition, offset)) == NONE:
            self._world.coverage.meet(RECORDS_DELETED)
            self._world.note(f"records of {topic.name}-{partition} below {offset} are deleted")
        else:
            client.forget(topic.name, partition)

    async def _delete(self, client: KafkaClient, ports: Ports, topic: AdministeredTopic) -> None:
        topic.machine.crash()
        topic.is_deleted = True
        await self._until(lambda: not self._partitions(topic.name), lambda: client.delete_topic(topic.name))
        self._world.note(f"{topic.name} is deleted")

    async def _restore(self, client: KafkaClient, ports: Ports, topic: AdministeredTopic) -> None:
        """Delete a topic and restore it after a while, perhaps too late. Its producer does not stop meanwhile.

        A deletion without an answer could be carried out after the restore, so the topic is then not restored.
        """
        if await self._answer(client.delete_topic(topic.name, self._bootstrap[0])) != NONE:
            await self._delete(client, ports, topic)
            return
        self._world.note(f"{topic.name} is deleted, to be restored")
        await asyncio.sleep(ports.random.uniform(0, 1.2 * roles.UNDELETE_WINDOW_MS / 1000))
        metadata = await roles.connect_metadata(ports)
        while not self._is_there(topic):
            try:
                await undelete(metadata, str(topic.topic_id))
            except StratalogError as failure:
                self._world.note(f"  {topic.name} is not restored: {failure!r}")
                if not self._is_restorable(topic) and not self._is_there(topic):
                    topic.machine.crash()
                    topic.is_deleted = True
                    break
                await asyncio.sleep(0.3)
        else:
            self._world.coverage.meet(TOPIC_RESTORED)
            self._world.note(f"{topic.name} is restored")
            if ports.random.random() < AGAIN_SHARE:
                await self._delete(client, ports, topic)
        await metadata.close()

    async def delete_with_a_late_marker(self, machine: Machine, ports: Ports, bucket: Bucket) -> None:
        """Delete a topic and restore it, so that its marker reaches the bucket after the restore, and perhaps delete it again.

        The audit requires that the marker of the first deletion does not end the time of the second.
        """
        topic = next(iter(self.live), None)
        found = self._found(topic.name) if topic is not None else None
        if topic is None or found is None or not self._world.decides("late marker"):
            return
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        metadata = await roles.connect_metadata(ports)
        key = deletion_marker_key(found.topic_id)
        bucket.late_keys.discard(key)
        bucket.faults.is_late = lambda key: deleted_topic_of(key) is not None
        await self._until(lambda: not self._partitions(topic.name), lambda: client.delete_topic(topic.name))
        await self._comes(lambda: key in bucket.late_keys, "was not written")
        while self._found(topic.name) is None:
            with contextlib.suppress(StratalogError):
                await undelete(metadata, str(found.topic_id))
            await asyncio.sleep(LOOK_S)
        bucket.faults.is_late = lambda key: False
        await self._comes(lambda: restored_topic_key(found.topic_id) not in self._records, "was not removed after the restore")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LATER_S):
                while key not in bucket.objects:  # noqa: ASYNC110 - the store tells nobody
                    await asyncio.sleep(LOOK_S)
            self._world.coverage.meet(MARKED_LATE)
            self._world.note(f"{topic.name} was restored, and is marked as deleted")
        if ports.random.random() < AGAIN_SHARE:
            await self._delete(client, ports, topic)
            await self._comes(lambda: not self._is_restorable(topic), "did not end the time for a restore")
        await metadata.close()

    async def _comes(self, is_there: Callable[[], bool], failure: str) -> None:
        until = self._world.loop.time() + LATE_S
        while not is_there():
            assert self._world.loop.time() < until, f"the marker of a deletion {failure}"
            await asyncio.sleep(LOOK_S)

    async def _until(self, is_done: Callable[[], bool], request: Callable[[], Coroutine[Any, Any, int]]) -> bool:
        """Repeat the request until it is done, and return whether one was enough: of several, one may be carried out later.

        A broker with a stale view may answer that a topic does not exist.
        """
        is_first = True
        while True:
            answer = await self._answer(request())
            if answer == NONE or is_done():
                return is_first and answer == NONE
            is_first = False
            await asyncio.sleep(0.3)

    def _found(self, name: str) -> Topic | None:
        """Return the topic's record in the quorum; None if the topic does not exist."""
        found = self._records.get(topic_key(name))
        return found if isinstance(found, Topic) else None

    def _partitions(self, name: str) -> int:
        """Return the topic's partition count in the quorum; 0 if the topic does not exist."""
        topic = self._found(name)
        return topic.partition_count if topic is not None else 0

    def _is_there(self, topic: AdministeredTopic) -> bool:
        """Whether the quorum has the topic, and not another one of its name."""
        found = self._found(topic.name)
        return found is not None and found.topic_id == topic.topic_id

    def _is_restorable(self, topic: AdministeredTopic) -> bool:
        """Whether the quorum has the topic as deleted and not final."""
        deleted = (each for each in self._records.values() if isinstance(each, DeletedTopic))
        return any(each.topic_id == topic.topic_id and not each.is_final for each in deleted)

    async def _answer(self, request: Coroutine[Any, Any, int]) -> int:
        try:
            return await request
        except NotServed:
            return -1

    # -- at the end

    async def check(self, machine: Machine, ports: Ports) -> None:
        """Read and check every live topic completely."""
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        for topic in self.live:
            for partition in range(topic.partitions):
                start, records = await read_all(client, topic.name, partition)
                for record in records:
                    topic.truth.see(partition, record)
                topic.truth.check_start(partition, start, topic.retention_ms)
                topic.truth.check_final(partition, records, start)

    def leftovers(self) -> str:
        """Return the names of deleted topics that metadata still has; empty if there are none.

        A request to create the topic may have been carried out after the deletion: then another topic has the name.
        """
        deleted = ((topic, self._found(topic.name)) for topic in self.topics if topic.is_deleted)
        return ", ".join(topic.name for topic, found in deleted if found is not None and topic.may_be(found))
