"""A topic that is restored and detached before its deletion marker reaches the bucket: a step of :mod:`.attachments`.

The write of the marker gets no answer and takes effect seconds later. The cluster no longer knows the topic then, so nobody
removes the marker. Checked: readers of the bucket see the topic, and the bucket's next owner has nothing to collect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from simulation.checkers.coverage import DETACHED_BEFORE_MARKED
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import LATER_S, Bucket, SimulatedStore
from stratalog_broker.admin.locked_history import require_unlocked
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.client.topic_deletion import delete_topic, restore_topic
from stratalog_metadata.records import DeletedTopic, Record, Topic, deleted_topic_key, restored_topic_key
from stratalog_tiering.attach.detachment import detach
from stratalog_tiering.cold.archive import live_topics
from stratalog_tiering.format.descriptor import OwnerDescriptor
from stratalog_tiering.format.object_keys import deletion_marker_key
from stratalog_tiering.maintenance.earlier_deletions import earlier_deletions

RESTORABLE_MS: Final = 60_000
TIMEOUT_S: Final = 5.0
LOOK_S: Final = 0.05


class LateMarker:
    """One run of the step. ``records`` are those of the quorum."""

    def __init__(self, world: World, bucket: Bucket, records: Mapping[str, Record]) -> None:
        self._world = world
        self._bucket = bucket
        self._records = records

    async def run(self, machine: Machine, ports: Ports) -> None:
        """Delete, restore and detach a topic, and wait for the marker of its deletion."""
        client = await roles.connect_metadata(ports)
        store = SimulatedStore(self._bucket, ports.loop, ports.random)
        topic = self._deletable(client, ports.clock.wall_ms())
        if topic is None:
            return
        key, found = deletion_marker_key(topic.topic_id), client.view.get(topic.key())
        assert found is not None
        self._bucket.late_keys.discard(key)
        self._bucket.faults.is_late = lambda written: written == key
        await client.propose(
            delete_topic(client.view, topic, found.version, ports.clock.wall_ms(), RESTORABLE_MS), TIMEOUT_S
        )  # fmt: skip
        await self._until(lambda: key in self._bucket.late_keys)
        await client.refresh(TIMEOUT_S)
        deleted = client.view.get(deleted_topic_key(topic.topic_id))
        assert deleted is not None
        assert isinstance(deleted.record, DeletedTopic)
        await client.propose(restore_topic(deleted.record, deleted.version, topic.name), TIMEOUT_S)
        self._bucket.faults.is_late = lambda _: False
        await self._until(lambda: restored_topic_key(topic.topic_id) not in self._records)
        await self._detach(client, ports, store, topic)
        self._world.note(f"{topic.name} was restored, and is detached")
        await asyncio.sleep(LATER_S)
        if key not in self._bucket.objects:
            return
        self._world.coverage.meet(DETACHED_BEFORE_MARKED)
        assert topic.topic_id in {each.topic_id for each in await live_topics(store)}, f"readers do not see {topic.name}"
        owner = OwnerDescriptor(cluster_id="next", number=1, taken_at_ms=ports.clock.wall_ms())
        collected = {each.deleted.topic_id for each in await earlier_deletions(store, client, owner)}
        assert topic.topic_id not in collected, f"the bucket's next owner collects {topic.name}, which is detached"

    def _deletable(self, client: QuorumClient, now_ms: int) -> Topic | None:
        for topic in sorted(client.view.all(Topic), key=lambda each: each.name):
            try:
                require_unlocked(topic, client.view, now_ms)
            except StratalogError:
                continue
            if topic.name.startswith(("attached-", "again-")):
                return topic
        return None

    async def _detach(self, client: QuorumClient, ports: Ports, store: SimulatedStore, topic: Topic) -> None:
        """Detach the topic, once workers have offloaded all of it."""
        while True:
            try:
                await detach(client, store, ports.clock, topic, TIMEOUT_S)
            except StratalogError as failure:
                self._world.note(f"  {topic.name} is not detached yet: {failure!r}")
                await asyncio.sleep(LOOK_S)
            else:
                return

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(LOOK_S)
