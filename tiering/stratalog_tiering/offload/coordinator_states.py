"""Stores the states of one broker's coordinators in the bucket, and deletes older ones.

A state is the whole content of a coordinator partition after all batches below an offset that the quorum has: a prefix of the
log, whoever writes it. Its key orders it by the number of the bucket's owner, the leader epoch and the offset, and no key is
written twice. So an owner that does not know that it was replaced can store nothing that hides its successor's state, and no
compare-and-set is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from stratalog_core.errors import Conflict, OutcomeUnknown
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_tiering.format.coordinator_state import CoordinatorState, encode_state
from stratalog_tiering.format.object_keys import StateKey, parse_state_key, state_key, states_prefix
from stratalog_tiering.offload.ownership import COMMITS_SHARE_S, BucketOwnership
from stratalog_tiering.store import Locked, ObjectStore

EARLIER_OWNERS_MS: Final = 7 * 24 * 3_600_000
"""After a restore, the states that the bucket's earlier owners stored are kept for this time."""
KEPT_STATES: Final = 2
"""States of a partition that are kept: if the newest is damaged, a restore takes the one before it."""


class CoordinatorStates:
    """The states of one broker's partitions in one store."""

    def __init__(self, store: ObjectStore, metadata: MetadataClient, clock: Clock) -> None:
        self._store = store
        self._ownership = BucketOwnership(store, metadata, clock, EARLIER_OWNERS_MS, check_store=None)
        self._clock = clock

    async def owner(self) -> tuple[str, int]:
        """The cluster's id and its number among the bucket's owners. Raises ``Invalid`` if the bucket is not this cluster's."""
        await self._ownership.confirm(COMMITS_SHARE_S)
        return self._ownership.owner.cluster_id, self._ownership.owner.number

    async def stored(self, topic: str, partition: int) -> list[StateKey]:
        """The places of the partition's states, the newest first, by one listing."""
        listed = [parse_state_key(info.key) async for info in self._store.list(states_prefix(topic, partition))]
        return sorted((place for place in listed if place is not None), reverse=True)

    async def put(self, state: CoordinatorState, stored: Sequence[StateKey]) -> list[StateKey]:
        """Store a state, then delete all but the newest of ``stored``; returns the places that are left, the newest first.

        Raises ``OutcomeUnknown`` (it may be stored; nothing was deleted), ``Unavailable``, ``Invalid``.
        """
        await self.owner()
        with suppress(Conflict):  # an attempt whose outcome was unknown: the place determines the state
            await self._store.put(state_key(state.place), [encode_state(state)])
        kept = [state.place, *(place for place in stored if place != state.place)]
        outdated = [place for place in kept[KEPT_STATES:] if self._may_delete(place)]
        await self._delete(outdated)
        return [place for place in kept if place not in outdated]

    def _may_delete(self, place: StateKey) -> bool:
        """Whether the state is this cluster's own, or the bucket was taken over long ago."""
        is_own = place.owner_number == self._ownership.owner.number
        return is_own or self._clock.wall_ms() >= self._ownership.deletes_from_ms

    async def _delete(self, places: Sequence[StateKey]) -> None:
        if not places:
            return
        with suppress(Locked, OutcomeUnknown):  # the next listing shows them again
            await self._store.delete([state_key(place) for place in places])
