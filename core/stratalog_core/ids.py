"""Nominal types for the ids and positions that cross component borders.

They cost nothing at run time and keep an entry id from being passed where an offset is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType
from uuid import UUID

LedgerId = NewType("LedgerId", int)
"""Cluster-wide, never reused; allocated by the metadata quorum."""

EntryId = NewType("EntryId", int)
"""Position of an entry in its ledger: 0, 1, 2 …; -1 means "before the first"."""

Offset = NewType("Offset", int)
"""Kafka offset of a record in its partition."""

LeaderEpoch = NewType("LeaderEpoch", int)
"""Rises by one at every change of a partition's owner; every command of an owner requires it."""

BrokerId = NewType("BrokerId", int)
BookieId = NewType("BookieId", str)
TopicId = UUID

NO_ENTRY = EntryId(-1)
NO_OWNER = BrokerId(-1)


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one incarnation of a topic: a re-created topic of the same name has another id."""

    topic_id: TopicId
    partition: int

    def __str__(self) -> str:
        return f"{self.topic_id}-{self.partition}"
