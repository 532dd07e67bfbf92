"""An operator that changes the tiering policies of topics while workers copy, drop and expire them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from simulation.world import roles
from simulation.world.machine import Machine, Ports
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Topic
from stratalog_metadata.state.commands import Command, Put, VersionIs

POLICIES: Final[tuple[Mapping[str, str], ...]] = (
    {},
    {"remote.log.copy.disable": "true"},
    {"remote.log.copy.disable": "true", "local.retention.ms": "0"},
    {"remote.storage.enable": "false"},
    {"local.retention.ms": "0"},
    {"local.retention.ms": "-2"},
    {"local.retention.ms": "1500"},
    {"local.retention.bytes": "400"},
)
PAUSE_MEAN_S: Final = 0.7
TIMEOUT_S: Final = 2.0


class PolicyOperator:
    """Changes the policies of ``topics``, whose other configs stay, until its machine crashes."""

    def __init__(self, topics: Sequence[Topic]) -> None:
        self._topics = topics

    async def run(self, machine: Machine, ports: Ports) -> None:
        metadata = await roles.connect_metadata(ports)
        for turn in itertools.count():
            chance = machine.world.random(f"{machine.name}/{turn}")
            await asyncio.sleep(chance.expovariate(1 / PAUSE_MEAN_S))
            topic, policy = chance.choice(self._topics), chance.choice(POLICIES)
            if machine.world.decides(f"{machine.name}#{turn}"):
                try:
                    await set_policy(metadata, topic, policy)
                except StratalogError as failure:
                    machine.world.note(f"  {machine.name}: {failure!r}")
                else:
                    machine.world.note(f"the policy of {topic.name} is {dict(policy)}")


async def set_policy(metadata: MetadataClient, topic: Topic, policy: Mapping[str, str]) -> None:
    """Set the topic's configs to those that it was created with and ``policy``. Raises ``Conflict``, ``Unavailable``."""
    (found,) = await metadata.read([topic.key()], TIMEOUT_S)
    assert found is not None
    changed = msgspec.structs.replace(topic, configs={**topic.configs, **policy})
    requirements = (VersionIs(key=topic.key(), version=found.version),)
    await metadata.propose(Command(updates=(Put(record=changed),), requirements=requirements), TIMEOUT_S)
