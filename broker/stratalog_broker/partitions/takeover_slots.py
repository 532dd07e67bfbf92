"""How many takeovers run at once. One that waits for the object store does not delay those that do not need it."""

from __future__ import annotations

from typing import Final

from stratalog_broker.partitions.batched_semaphore import BatchedSemaphore
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Log, ManifestPointer, Partition, log_key, manifest_pointer_key

TAKEOVERS_AT_ONCE: Final = 1024
"""Takeovers that begin together send their requests together; further ones are queued and admitted in batches
(``batched_semaphore.py``)."""
INTERNAL_TAKEOVERS_AT_ONCE: Final = 128
"""Fewer, because takeovers of internal topics read whole batches, not headers."""


class TakeoverSlots:
    """The slots of one broker. Those of takeovers that need the store may be held for as long as it does not answer."""

    def __init__(self, view: MetadataView) -> None:
        self._view = view
        self._hot, self._cold = BatchedSemaphore(TAKEOVERS_AT_ONCE), BatchedSemaphore(TAKEOVERS_AT_ONCE)
        self._internal = BatchedSemaphore(INTERNAL_TAKEOVERS_AT_ONCE)

    def of(self, partition: Partition, *, is_internal: bool) -> BatchedSemaphore:
        """Return the slots for a takeover of the partition."""
        if is_internal:
            return self._internal
        return self._cold if self._needs_store(partition) else self._hot

    def _needs_store(self, partition: Partition) -> bool:
        """Whether the state is only in the object store: no ledger is left, and the last owner handed no state over."""
        identity = partition.topic_id, partition.index
        log = self._view.find(Log, log_key(*identity))
        is_elsewhere = log is not None and bool(log.ledgers or partition.handed)
        return not is_elsewhere and self._view.find(ManifestPointer, manifest_pointer_key(*identity)) is not None
