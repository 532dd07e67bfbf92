"""Detaches a topic whose records are all in the bucket, by one command; nothing deletes its objects from then on."""

from __future__ import annotations

from stratalog_core.errors import Conflict
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.records import Topic, deleted_topic_key
from stratalog_metadata.state.guarded_update import GONE, Superseded
from stratalog_tiering.core.detaching import committed_pointers, detach_topic
from stratalog_tiering.core.partition import partition_snapshot
from stratalog_tiering.format.descriptor import Detachment
from stratalog_tiering.offload.commit_markers import mark_committed
from stratalog_tiering.offload.ownership import cluster_id_in
from stratalog_tiering.offload.topic_descriptors import describe_topic
from stratalog_tiering.store import ObjectStore


async def detach(metadata: MetadataClient, store: ObjectStore, clock: Clock, topic: Topic, timeout_s: float) -> None:
    """Remove ``topic`` from metadata, and leave its history in the bucket so that readers of the bucket find all of it.

    Raises ``Conflict`` if a record is not in the bucket, or was written meanwhile, or the topic is no longer as ``topic`` says,
    ``Unavailable``, ``OutcomeUnknown``.
    """
    await metadata.refresh(timeout_s)
    states = [state for index in range(topic.partition_count) if (state := partition_snapshot(metadata.view, topic, index))]
    if len(states) != topic.partition_count:
        raise Conflict(f"topic {topic.name!r} is changing")
    if any(state.topic != topic for state in states):
        # It may have more partitions, which have records, or be protected now. The command requires the newest version.
        raise Conflict(f"topic {topic.name!r} has changed since its detachment was decided")
    command = detach_topic(topic, states)
    # Before the topic leaves metadata: after that nobody removes a marker that an earlier deletion wrote late.
    detached = Detachment(cluster_id=cluster_id_in(metadata), topic_version=states[0].topic_version)
    await describe_topic(store, topic, detached)
    for pointer in committed_pointers(states):
        await mark_committed(store, pointer, clock.wall_ms())
    try:
        version = await propose_guarded(metadata, command, topic.key(), timeout_s)
    except Superseded as changed:
        event = "was deleted or detached by somebody else" if changed.found is None else "has changed"
        raise Conflict(f"topic {topic.name!r} {event} while it was detached") from changed
    if version == GONE and metadata.view.get(deleted_topic_key(topic.topic_id)) is not None:
        # The topic is gone in both cases, but its objects do not stay.
        raise Conflict(f"topic {topic.name!r} was deleted while it was detached")
