"""Checks the states of coordinators in the bucket: each is a prefix of the log that stays, and the newest hides none.

A position in a stored state is like one that was read: from then on the group has it, or a later one. Whatever a replaced owner
still stores or deletes, the state that comes first in a listing is the one of the greatest offset ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from simulation.checkers.audit import Audit
from simulation.world.object_store import Bucket
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_core.errors import Corrupt
from stratalog_tiering.format.coordinator_state import decode_state
from stratalog_tiering.format.object_keys import COORDINATORS_PREFIX, StateKey, parse_state_key, state_key

SeenCommit = Callable[[str, int, int], None]
"""``(group, partition, offset)``: told of each position in a stored state."""


class StoredStates:
    """Watches one bucket. ``seen`` is called for each position of ``topic``.

    States of leader epochs below ``first_epoch`` are those of a lost history; their writes may take effect late.
    """

    def __init__(self, audit: Audit, bucket: Bucket, topic: str, seen: SeenCommit, first_epoch: int = 0) -> None:
        self._audit = audit
        self._bucket = bucket
        self._topic: Final = topic
        self._seen = seen
        self._first_epoch: Final = first_epoch
        self._greatest: dict[tuple[str, int], int] = {}
        bucket.on_written = self.written
        bucket.on_gone = self.gone

    def written(self, key: str, content: bytes) -> None:
        """Check a state that was stored, also one whose writer does not learn of it."""
        place = parse_state_key(key)
        if place is None or place.leader_epoch < self._first_epoch:
            return
        try:
            state = decode_state(content, place)
        except Corrupt as damaged:
            self._audit.require(False, f"{key} is damaged: {damaged}")
            return
        name = place.topic, place.partition
        self._greatest[name] = max(self._greatest.get(name, 0), place.offset)
        self._newest_is_greatest(*name)
        if place.topic == CONSUMER_OFFSETS:
            for group, partition, offset in positions(state.checkpoint.application_state, self._topic):
                self._seen(group, partition, offset)

    def gone(self, keys: Sequence[str]) -> None:
        """Check the states that are left after a deletion."""
        for name in {(place.topic, place.partition) for key in keys if (place := parse_state_key(key)) is not None}:
            self._newest_is_greatest(*name)

    def _newest_is_greatest(self, topic: str, partition: int) -> None:
        newest = self.newest(topic, partition)
        offset = newest.offset if newest is not None else 0
        greatest = self._greatest.get((topic, partition), offset)
        self._audit.require(offset == greatest, f"the newest state of {topic}-{partition} is of {offset}, not {greatest}")

    def newest(self, topic: str, partition: int) -> StateKey | None:
        """The place of the state that a restore would take."""
        prefix = f"{COORDINATORS_PREFIX}{topic}/{partition}/"
        return max(
            (place for key in self._bucket.objects if key.startswith(prefix) and (place := parse_state_key(key))), default=None
        )

    def restored(self, partition_count: int) -> dict[tuple[str, int], int]:
        """The position of each group in each partition of the topic that a restore would find."""
        found: dict[tuple[str, int], int] = {}
        for index in range(partition_count):
            place = self.newest(CONSUMER_OFFSETS, index)
            if place is not None:
                content = decode_state(self._bucket.objects[state_key(place)][0], place).checkpoint.application_state
                found |= {(group, partition): offset for group, partition, offset in positions(content, self._topic)}
        return found


def positions(state: bytes | None, topic: str) -> list[tuple[str, int, int]]:
    """Group, partition and offset of each committed position of ``topic``."""
    offsets = GroupStore.from_snapshot(state).offsets
    return [
        (group, partition, committed.offset)
        for group, table in offsets.items()
        for (name, partition), committed in table.items()
        if name == topic
    ]
