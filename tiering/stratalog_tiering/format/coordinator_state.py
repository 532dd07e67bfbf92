"""The state of one coordinator partition in the bucket: groups and their positions, or transactional ids. No I/O.

Internal topics are not offloaded (ADR 153). A restore needs only the state at their end, which is small: the content of
a ledger's checkpoint. Format: ``docs/reference/formats/coordinator-state.md``.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_tiering.format.object_frame import frame, unframe
from stratalog_tiering.format.object_keys import StateKey

_MAGIC: Final = b"SLCOORDN"


class CoordinatorState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state after all batches below ``checkpoint.offset`` and no others, and the topic that a restore makes for it.

    ``owner_number``: number of the bucket's owner whose broker, or whose restore, wrote it. ``taken_at_ms``: wall time.
    """

    cluster_id: str
    owner_number: int
    topic: str
    topic_id: UUID
    partition: int
    partition_count: int
    replication_factor: int
    configs: dict[str, str] = {}
    leader_epoch: int
    taken_at_ms: int
    checkpoint: Checkpoint

    @property
    def place(self) -> StateKey:
        """The parts of the object's key."""
        return StateKey(self.topic, self.partition, self.owner_number, self.leader_epoch, self.checkpoint.offset)


def encode_state(state: CoordinatorState) -> bytes:
    return frame(_MAGIC, state)


def decode_state(content: Buffer, place: StateKey) -> CoordinatorState:
    """Decode the object at ``place``. Raises ``Corrupt``, also for another place's state; ``Invalid`` for a newer format."""
    name = f"state of {place.topic}-{place.partition}"
    state = unframe(content, _MAGIC, CoordinatorState, name, None, {})
    if state.place != place:
        raise Corrupt(f"{name} at offset {place.offset} has the content of {state.place}")
    return state
