"""Committed offsets of a group in a bucket that restores take over: each restored topic has its own again.

The first installation has stored them for all topics. Whatever topics a restore has brought back, and in how many steps, the
state with which the internal topic then begins has the offset of each of them, at most its restored end. An earlier restore
that had cut the history below an offset has moved it back for all later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from uuid import UUID

from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_metadata.records import Log, ManifestPointer, Record, Topic, log_key, manifest_pointer_key, topic_key
from stratalog_tiering.format.coordinator_state import CoordinatorState, decode_state
from stratalog_tiering.format.object_keys import StateKey, parse_state_key

GROUP: Final = "readers"
COMMITTED: Final = 1
TOPIC_ID: Final = UUID(int=0xC0)


def stored_offsets(cluster_id: str, topics: Sequence[Topic]) -> CoordinatorState:
    """The state that the first owner of the bucket stores."""
    groups = GroupStore()
    for topic in topics:
        committed = CommittedOffset(
            offset=COMMITTED, leader_epoch=-1, metadata="", committed_at_ms=1, topic_id=topic.topic_id
        )  # fmt: skip
        groups.put(OffsetKey(GROUP, topic.name, 0), committed)
    return CoordinatorState(
        cluster_id=cluster_id, owner_number=0, topic=CONSUMER_OFFSETS, topic_id=TOPIC_ID, partition=0, partition_count=1,
        replication_factor=1, leader_epoch=7, taken_at_ms=1,
        checkpoint=Checkpoint(offset=len(topics), application_state=groups.snapshot()),
    )  # fmt: skip


def wrong_offsets(records: Mapping[str, Record], objects: Mapping[str, tuple[bytes, int, int]], topics: Sequence[Topic]) -> str:
    """The first mistake in the offsets with which a cluster begins; empty if there is none. ``records`` are its metadata."""
    log = records.get(log_key(TOPIC_ID, 0))
    place = parse_state_key(log.restored_from) if isinstance(log, Log) else None
    if not isinstance(log, Log) or place is None:
        return f"{CONSUMER_OFFSETS} is not restored"
    state = decode_state(objects[log.restored_from][0], place)
    earlier = [_offsets_in(decode_state(content, each)) for each, content in _states(objects, place.owner_number)]
    found = _offsets_in(state)
    for topic in topics:
        if topic_key(topic.name) not in records:
            continue
        pointer = records.get(manifest_pointer_key(topic.topic_id, 0))
        end_offset = pointer.end_offset if isinstance(pointer, ManifestPointer) else 0
        wanted = {min(offsets[topic.name], end_offset) for offsets in earlier if topic.name in offsets}
        if found.get(topic.name) not in wanted:
            return f"{GROUP} has committed {found.get(topic.name)} of {topic.name} after the restore, not {sorted(wanted)}"
    return ""


def _states(objects: Mapping[str, tuple[bytes, int, int]], owner_number: int) -> Iterator[tuple[StateKey, bytes]]:
    """The states that owners of the bucket before ``owner_number`` have stored."""
    for key, (content, *_) in objects.items():
        place = parse_state_key(key)
        if place is not None and place.topic == CONSUMER_OFFSETS and place.owner_number < owner_number:
            yield place, content


def _offsets_in(state: CoordinatorState) -> dict[str, int]:
    offsets = GroupStore.from_snapshot(state.checkpoint.application_state).offsets_of(GROUP)
    return {topic: committed.offset for (topic, _), committed in offsets.items()}
