"""The cluster's claim on its bucket (or prefix), made before a worker writes to the bucket or deletes from it.

Two clusters over one prefix would delete each other's objects as orphans, so the first cluster to write its id owns the prefix.
A worker that cannot reach the store yet works without the claim; it can then only do what needs no store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from stratalog_core.errors import Invalid, NoSuchObject, OutcomeUnknown, Unavailable
from stratalog_metadata.client.api import MetadataClient
from stratalog_tiering.format.descriptor import ClusterDescriptor, decode_descriptor
from stratalog_tiering.format.object_keys import CLUSTER_KEY
from stratalog_tiering.offload.commit import put_once
from stratalog_tiering.offload.ports import cluster_id_in
from stratalog_tiering.store import ObjectStore


class BucketClaim:
    """The claim of one worker's cluster. A claim is permanent, so it is made and checked once per worker.

    ``check_store`` is awaited before anything else is written. It raises ``Invalid`` if the store is not safe to write to.
    """

    def __init__(self, store: ObjectStore, metadata: MetadataClient, check_store: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._metadata = metadata
        self._check_store = check_store
        self._is_made = False

    async def ensure(self) -> None:
        """Return once the bucket is this cluster's.

        Raises ``Invalid`` if another cluster owns it or the store is unsafe, ``Unavailable`` or ``StorageFailed`` if the store
        does not answer, or if metadata does not know the cluster's id yet; call it again then.
        """
        if self._is_made:
            return
        cluster_id = cluster_id_in(self._metadata)
        try:
            await self._check_store()
            await claim_bucket(self._store, cluster_id)
        except OutcomeUnknown as unknown:
            # The claim takes effect once and is read before it is believed, so an unknown outcome is one to retry.
            raise Unavailable(f"the bucket is not claimed yet: {unknown.message}") from unknown
        self._is_made = True


async def claim_bucket(store: ObjectStore, cluster_id: str) -> None:
    """Write the cluster's id into the bucket, unless an id is there. Raises ``Invalid`` if it is another cluster's."""
    try:
        owner = await _owner(store)
    except NoSuchObject:
        await put_once(store, CLUSTER_KEY, ClusterDescriptor(cluster_id=cluster_id))
        owner = await _owner(store)
    _refuse_other(store, owner, cluster_id)


async def check_claim(store: ObjectStore, cluster_id: str) -> None:
    """Raise ``Invalid`` unless the bucket is the cluster's. Writes nothing."""
    try:
        owner = await _owner(store)
    except NoSuchObject:
        raise Invalid(f"{store.url} belongs to no cluster: check --store, and that a tiering worker has started") from None
    _refuse_other(store, owner, cluster_id)


def _refuse_other(store: ObjectStore, owner: str, cluster_id: str) -> None:
    if owner != cluster_id:
        raise Invalid(f"{store.url} belongs to cluster {owner}, not {cluster_id}: give each cluster its own bucket or prefix")


async def _owner(store: ObjectStore) -> str:
    return decode_descriptor(await store.get(CLUSTER_KEY), ClusterDescriptor, CLUSTER_KEY).cluster_id
