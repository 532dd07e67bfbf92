"""Claims the bucket (or prefix) for one cluster before anything else is written to it."""

from __future__ import annotations

from stratalog_core.errors import Invalid
from stratalog_tiering.format.descriptor import ClusterDescriptor, decode_descriptor
from stratalog_tiering.format.object_keys import CLUSTER_KEY
from stratalog_tiering.offload.commit import put_once
from stratalog_tiering.store import ObjectStore


async def claim_bucket(store: ObjectStore, cluster_id: str) -> None:
    """Write the cluster's id into the bucket, or raise ``Invalid`` if the bucket belongs to another cluster.

    Two clusters over one prefix would delete each other's objects as orphans.
    """
    await put_once(store, CLUSTER_KEY, ClusterDescriptor(cluster_id=cluster_id))
    owner = decode_descriptor(await store.get(CLUSTER_KEY), ClusterDescriptor, CLUSTER_KEY)
    if owner.cluster_id != cluster_id:
        raise Invalid(
            f"{store.url} belongs to cluster {owner.cluster_id}, not {cluster_id}: give each cluster its own bucket or prefix"
        )
