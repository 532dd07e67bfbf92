"""The cluster's ownership of its bucket (or prefix). Only the owner writes to the bucket and deletes from it.

Two clusters over one prefix would delete each other's objects as orphans, so the first cluster to write its id owns the prefix.
A restore takes the bucket over for another cluster by writing the next owner. The workers of the previous owner notice that
before their next deletion, and before any commit that begins ``COMMITS_SHARE_S`` later, and stop; the restore waits for as long
before it reads the history. A worker that cannot reach the store yet works without the claim; it can then only do what needs no
store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from stratalog_core.errors import Conflict, Invalid, NoSuchObject, OutcomeUnknown, Unavailable
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import CLUSTER_KEY, Cluster
from stratalog_tiering.cold.archive import read_owner
from stratalog_tiering.format.descriptor import OwnerDescriptor
from stratalog_tiering.format.object_keys import owner_key
from stratalog_tiering.offload.descriptors import put_once
from stratalog_tiering.store import ObjectStore

COMMITS_SHARE_S: Final = 1.0
"""Commits that begin within this time share one look for another owner of the bucket. Each deletion looks for itself."""
_TAKEOVER_S: Final = 1.5 * COMMITS_SHARE_S
"""Also covers clocks that run at different rates, and a commit that has just begun."""


def cluster_id_in(metadata: MetadataClient) -> str:
    """The cluster's id. Raises ``Unavailable`` until metadata knows it."""
    cluster = metadata.view.find(Cluster, CLUSTER_KEY)
    if cluster is None:
        raise Unavailable("the cluster has no id in metadata yet")
    return cluster.cluster_id


def deletes_from_ms(owner: OwnerDescriptor, grace_ms: int) -> int:
    """Wall time from which the owner may delete: a grace period after a takeover, at once for the first owner."""
    return owner.taken_at_ms + grace_ms if owner.number else 0


class BucketOwnership:
    """The ownership of one worker's cluster. ``ensure`` claims the bucket once; ``confirm`` checks that it is not taken over.

    ``check_store`` is awaited before anything else is written. It raises ``Invalid`` if the store is not safe to write to.
    None: nothing is claimed. Brokers leave that to the workers, which check the store.
    """

    def __init__(
        self,
        store: ObjectStore,
        metadata: MetadataClient,
        clock: Clock,
        grace_ms: int,
        check_store: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._store = store
        self._metadata = metadata
        self._clock = clock
        self._grace_ms = grace_ms
        self._check_store = check_store
        self._owner: OwnerDescriptor | None = None
        self._confirmed_s = float("-inf")

    @property
    def deletes_from_ms(self) -> int:
        """Wall time from which objects may be deleted: one grace period after the bucket was taken over, else 0."""
        return deletes_from_ms(self._owner, self._grace_ms) if self._owner is not None else 0

    @property
    def owner(self) -> OwnerDescriptor:
        """This cluster's ownership, when it is confirmed."""
        assert self._owner is not None, "the ownership was confirmed"
        return self._owner

    async def ensure(self) -> None:
        """Return once the bucket is this cluster's.

        Raises ``Invalid`` if another cluster owns it or the store is unsafe, ``Unavailable`` or ``StorageFailed`` if the store
        does not answer, or if metadata does not know the cluster's id yet; call it again then.
        """
        if self._owner is not None:
            return
        cluster_id = cluster_id_in(self._metadata)
        try:
            if self._check_store is None:
                self._owner = await check_claim(self._store, cluster_id)
            else:
                await self._check_store()
                self._owner = await claim_bucket(self._store, cluster_id, self._clock.wall_ms())
        except OutcomeUnknown as unknown:
            # The claim takes effect once and is read before it is believed, so an unknown outcome is one to retry.
            raise Unavailable(f"the bucket is not claimed yet: {unknown.message}") from unknown

    async def confirm(self, within_s: float = 0.0) -> None:
        """Return if no other cluster had taken the bucket over ``within_s`` ago. Raises as ``ensure`` does."""
        await self.ensure()
        assert self._owner is not None
        now_s = self._clock.monotonic()
        if now_s - self._confirmed_s < within_s:
            return
        try:
            await self._store.head(owner_key(self._owner.number + 1))
        except NoSuchObject:
            self._confirmed_s = now_s
            return
        self._owner = None
        await self.ensure()


async def claim_bucket(store: ObjectStore, cluster_id: str, now_ms: int) -> OwnerDescriptor:
    """Write the cluster's id into the bucket, unless an owner is there; returns the owner.

    Raises ``Invalid`` if that is another cluster, ``OutcomeUnknown`` (call it again).
    """
    owner = await read_owner(store)
    if owner is None:
        await put_once(store, owner_key(0), OwnerDescriptor(cluster_id=cluster_id, number=0, taken_at_ms=now_ms))
        owner = await read_owner(store)
    return _checked(store, owner, cluster_id)


async def check_claim(store: ObjectStore, cluster_id: str) -> OwnerDescriptor:
    """The bucket's owner. Raises ``Invalid`` unless that is this cluster. Writes nothing."""
    owner = await read_owner(store)
    if owner is None:
        raise Invalid(f"{store.url} belongs to no cluster: check --store, and that a tiering worker has started")
    return _checked(store, owner, cluster_id)


def _checked(store: ObjectStore, owner: OwnerDescriptor | None, cluster_id: str) -> OwnerDescriptor:
    if owner is None or owner.cluster_id != cluster_id:
        other = owner.cluster_id if owner is not None else "unknown"
        raise Invalid(
            f"{store.url} belongs to cluster {other}, not {cluster_id}: give each cluster its own bucket or prefix, or take"
            " this one over with `stratalog restore`"
        )
    return owner


async def refuse_next_owner(store: ObjectStore, number: int) -> None:
    """Raise ``Conflict`` if another cluster has taken the bucket over from its owner of this number."""
    try:
        await store.head(owner_key(number + 1))
    except NoSuchObject:
        return
    raise Conflict(f"another cluster has taken {store.url} over since this restore began")


async def take_over(store: ObjectStore, cluster_id: str, now_ms: int) -> OwnerDescriptor:
    """Make the cluster the bucket's owner; returns the owner. Writes nothing if it is that already.

    Returns when the previous owner's workers begin no commit any more: what they have committed until then is in the bucket.
    It also waits for that if the cluster is the owner already: an attempt before this one may have ended just after its write.
    Raises ``Conflict`` if another cluster takes the bucket over at the same time, ``OutcomeUnknown`` (call it again).
    """
    owner = await read_owner(store)
    if owner is None or owner.cluster_id != cluster_id:
        number = owner.number + 1 if owner is not None else 0
        made = OwnerDescriptor(
            cluster_id=cluster_id, number=number, taken_at_ms=now_ms,
            previous_cluster_id=owner.cluster_id if owner is not None else "",
        )  # fmt: skip
        await put_once(store, owner_key(number), made)
        owner = await read_owner(store)
    if owner is None or owner.cluster_id != cluster_id:
        raise Conflict(f"cluster {owner.cluster_id if owner else 'unknown'} has taken {store.url} over at the same time")
    if owner.number:
        await asyncio.sleep(_TAKEOVER_S)
    return owner
