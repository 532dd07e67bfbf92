"""The second copy of a cluster's bucket, in another bucket or store: who may write it, and what is known of it.

It holds the same objects under the same keys as the first, and is a bucket of the cluster like it: topics can be restored, read
and scrubbed from it alone. It has the first bucket's owners, so a cluster that takes it over stops the previous one's copying.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject
from stratalog_tiering.cold.archive import read_owner
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.format.descriptor import OwnerDescriptor, decode_descriptor
from stratalog_tiering.format.object_keys import owner_key
from stratalog_tiering.metrics import SecondCopyMetrics
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ownership import BucketOwnership
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.store import Locked, ObjectStore, delete_batches

PARTITIONS_MAX: Final = 100_000
"""The number of partitions of which a worker remembers what is copied; for others it lists the second store again."""
_DELETES_AT_ONCE: Final = 200
WHOLE: Final = 0
"""The second copy has all of a detached topic."""
_log = logging.getLogger(__name__)


class SecondCopy:
    """One worker's view of the second copy. ``known``: by pointer key, the manifest key of the newest version that it has.

    ``detached``: the detached topics, each with the wall time (ms) from which one more look is enough, or ``WHOLE``.
    """

    def __init__(self, store: ObjectStore, bucket: BucketOwnership, limits: CopyLimits, grace_ms: int) -> None:
        """``bucket`` is the cluster's ownership of ``store``."""
        self.store = store
        self.source = ManifestSource(store, background=limits.background)
        self.limits = limits
        self.grace_ms = grace_ms
        self.locks = KnownLocks(store)
        self.counters = SecondCopyMetrics()
        self.known: LruCache[str, str] = LruCache(PARTITIONS_MAX)
        self.detached: LruCache[UUID, int] = LruCache(PARTITIONS_MAX)
        self._bucket = bucket
        self._has_owners = False

    async def confirm(self, ports: WorkerPorts) -> None:
        """Return if both buckets are this cluster's. The first bucket's owners are copied to the second once, and after a loss.

        Raises ``Invalid`` if one belongs to another cluster or history, or the second store is unsafe, ``Unavailable``.
        """
        await ports.bucket.confirm()
        if not self._has_owners:
            await self._copy_owners(ports)
            self._has_owners = True
        await self._bucket.confirm()

    def lost(self, pointer_key: str) -> None:
        """Forget that it has a version which a listing does not show: somebody emptied it, or replaced it, owners included."""
        self.known.pop(pointer_key)
        self._has_owners = False

    def lost_topic(self, topic_id: UUID) -> None:
        """Forget that it has anything of a detached topic, as `lost` does for a version."""
        self.detached.pop(topic_id)
        self._has_owners = False

    async def delete(self, ports: WorkerPorts, keys: Sequence[str]) -> int:
        """Delete objects; returns how many the store keeps under a lock of somebody else. Raises as ``confirm`` does."""

        async def delete(batch: Sequence[str]) -> None:
            await ports.deleting.take(len(batch))
            await self.confirm(ports)
            await self.store.delete(batch)

        kept = 0
        try:
            await delete_batches(keys, _DELETES_AT_ONCE, delete)
        except Locked as locked:
            _log.warning("objects of the second copy stay: %s", locked.message)
            kept = len(locked.detail["keys"])
        self.counters.objects_deleted += len(keys) - kept
        return kept

    async def _copy_owners(self, ports: WorkerPorts) -> None:
        first, newest = ports.store, ports.bucket.owner
        owners: dict[int, OwnerDescriptor] = {}
        contents: dict[int, bytes] = {}
        for number in range(newest.number + 1):
            key = owner_key(number)
            try:
                contents[number] = await first.get(key)
                owners[number] = decode_descriptor(contents[number], OwnerDescriptor, key)
            except (Corrupt, NoSuchObject) as lost:
                if number == newest.number:
                    raise
                _log.warning("an earlier owner is not copied: %s", lost.message)
        present = await read_owner(self.store)
        if present is not None and present not in owners.values():
            raise Invalid(
                f"{self.store.url} belongs to cluster {present.cluster_id}, and not to the history in {first.url}: give the"
                " second copy a bucket or prefix of its own"
            )
        for number in owners:
            if present is None or number > present.number:
                await put_if_absent(self.store, owner_key(number), contents[number])


async def put_if_absent(store: ObjectStore, key: str, content: bytes) -> None:
    """Write a small object that never changes, unless it is there."""
    try:
        await store.put(key, [content])
    except Conflict:
        return
