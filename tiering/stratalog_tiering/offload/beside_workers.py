"""A partition as a command sees it that edits history beside running workers, without the partition's lease.

A commit of such a command requires the manifest and the topic from which it began, so a worker's commit in between makes the
command fail or begin again, and nothing else. Until then what it has written is an orphan to a worker's sweep, so it
holds a reader's lease, and commits nothing without one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

from stratalog_core.errors import NotFound
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Topic, configs_in_force, topic_key
from stratalog_metadata.state.commands import VersionIs
from stratalog_tiering.cold.lease import DURATION_MS, HeldLease, held, holder_name
from stratalog_tiering.core.commands import Guards
from stratalog_tiering.core.partition import PartitionSnapshot, partition_snapshot
from stratalog_tiering.core.policy import TierPolicy, tier_policy
from stratalog_tiering.offload.ports import WorkerPorts


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentPartition:
    """The partition, its policy, and what a command requires beside the manifest that it edits."""

    state: PartitionSnapshot
    policy: TierPolicy
    guards: Guards


async def current_partition(ports: WorkerPorts, topic_id: UUID, partition: int) -> CurrentPartition:
    """The partition as metadata has it now. Raises ``NotFound`` if it does not know it, ``Unavailable``."""
    await ports.metadata.refresh()
    view = ports.metadata.view
    topic = next((each for each in view.all(Topic) if each.topic_id == topic_id), None)
    state = partition_snapshot(view, topic, partition) if topic is not None else None
    if topic is None or state is None:
        raise NotFound(f"metadata does not know partition {partition} of topic {topic_id}")
    policy = tier_policy(configs_in_force(topic, topic_defaults(view)))
    guards = (VersionIs(key=topic_key(topic.name), version=state.topic_version),)
    return CurrentPartition(state=state, policy=policy, guards=guards)


@asynccontextmanager
async def unswept(ports: WorkerPorts, topic_id: UUID, what: str) -> AsyncIterator[HeldLease]:
    """Keep what is written within from being swept; ``check`` the lease before a commit that refers to it. Raises as `held`."""
    lease = HeldLease(ports.store, ports.clock, ports.random_id(), holder_name(what), [topic_id], DURATION_MS)
    async with held(lease):
        yield lease
