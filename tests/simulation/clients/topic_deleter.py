"""Deletes one topic by mistake and restores it after a while, again and again: mostly while a transaction is open in it.

The deletion is the product's command with a long time for the restore, so that faults never make it final.
"""

from __future__ import annotations

import asyncio
from typing import Final

from simulation.checkers.coverage import TOPIC_RESTORED
from simulation.checkers.transaction_outcomes import Outcomes
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_broker.admin.deleted_topics import undelete
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.client.topic_deletion import delete_topic, restorable_topics
from stratalog_metadata.records import Topic, topic_key

PAUSE_MEAN_S: Final = 3.0
DELETED_S: Final = (0.0, 5.0)
RESTORABLE_MS: Final = 86_400_000
ATTEMPT_S: Final = 5.0
RETRY_S: Final = 0.2
LOOK_S: Final = 0.002
LOOKS: Final = 1_000


class TopicDeleter:
    """Works until ``stop`` is set; then the topic is there, and ``stopped`` is set."""

    def __init__(self, world: World, outcomes: Outcomes, topic: str) -> None:
        self._world = world
        self._outcomes = outcomes
        self._topic = topic
        self.stop = False
        self.stopped = asyncio.Event()

    async def run(self, machine: Machine, ports: Ports) -> None:
        metadata = await roles.connect_metadata(ports)
        turn = 0
        while not self.stop:
            turn += 1
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))
            if not self.stop and self._world.decides(f"{machine.name}#{turn}"):
                await self._until_one_is_open()
                await self._delete(metadata, ports)
                self._world.note(f"{self._topic} is deleted, to be restored")
                await asyncio.sleep(ports.random.uniform(*DELETED_S))
                await self._restore(metadata)
                self._world.coverage.meet(TOPIC_RESTORED)
                self._world.note(f"{self._topic} is restored")
        self.stopped.set()
        await asyncio.Event().wait()

    async def _until_one_is_open(self) -> None:
        """Return as soon as a transaction is about to write to the topic, or after some time without one."""
        for _ in range(LOOKS):
            if self._outcomes.are_open:
                return
            await asyncio.sleep(LOOK_S)

    async def _delete(self, metadata: MetadataClient, ports: Ports) -> None:
        """Return when the topic is deleted."""
        while True:
            try:
                await metadata.refresh()
                found = metadata.view.get(topic_key(self._topic))
                if found is None:
                    return
                assert isinstance(found.record, Topic)
                command = delete_topic(metadata.view, found.record, found.version, ports.clock.wall_ms(), RESTORABLE_MS)
                await propose_guarded(metadata, command, found.record.key(), ATTEMPT_S)
            except StratalogError as failure:
                self._world.note(f"  {self._topic} is not deleted: {failure!r}")
                await asyncio.sleep(RETRY_S)

    async def _restore(self, metadata: MetadataClient) -> None:
        """Return when the topic is there."""
        while True:
            try:
                await metadata.refresh()
                if not any(each.name == self._topic for each in restorable_topics(metadata.view)):
                    return
                await undelete(metadata, self._topic)
            except StratalogError as failure:
                self._world.note(f"  {self._topic} is not restored: {failure!r}")
                await asyncio.sleep(RETRY_S)
