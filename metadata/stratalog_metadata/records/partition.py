"""A partition's owner, its hot ledgers, and the pointer to its cold history: three records with three writers.

The controller writes ``Partition``, the owner (new ledgers) and tiering (offloaded ones) write ``Log``, tiering writes
``ManifestPointer``. Because they are separate, a failover of a thousand partitions changes only the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec

from stratalog_metadata.records.base import RecordBase

KEEP_METADATA: Final = "metadata"
KEEP_STORE: Final = "store"
NO_OWNER: Final = -1


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one incarnation of a topic: a re-created topic of the same name has another id."""

    topic_id: UUID
    partition: int

    def __str__(self) -> str:
        return f"{self.topic_id}-{self.partition}"


class Partition(RecordBase, frozen=True, kw_only=True, tag="partition"):
    """``owner`` is a broker id, or ``NO_OWNER``. ``leader_epoch`` rises with every change of owner.

    ``owner_session`` is the session that the owner had when the controller chose it: a broker that comes back under a
    new session gets a new epoch too. 0: somebody else than the controller wrote the record.

    ``next_owner``: the broker that the controller wants the partition handed to, or ``NO_OWNER``. The owner then holds
    new batches, seals its open ledger and writes the next owner itself, so that nothing has to be recovered.

    ``replicas``: brokers in the order in which they are to own it, as somebody assigned them; empty: any broker.

    ``reassigned_from``: the ``replicas`` before a reassignment, until the partition has changed its owner; None: there is none.

    ``handed``: the last owner's state at log end (a checkpoint part of ``stratalog_core.batches.checkpoint``) if it is small.
    It holds as long as the log ends there. Empty: the next owner gathers it.
    """

    topic_id: UUID
    index: int
    owner: int = NO_OWNER
    leader_epoch: int = 0
    owner_session: int = 0
    next_owner: int = NO_OWNER
    handed: bytes = b""
    replicas: tuple[int, ...] = ()
    reassigned_from: tuple[int, ...] | None = None

    def key(self) -> str:
        return partition_key(self.topic_id, self.index)


class LedgerRef(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A hot ledger in a partition's log. Its first offset is known when it is opened."""

    ledger_id: int
    base_offset: int
    leader_epoch: int


class Log(RecordBase, frozen=True, kw_only=True, tag="log"):
    """Hot ledgers in offset order, contiguous with the manifest's end; all but at most the last are sealed.

    ``log_start_offset`` is the first offset that retention or DeleteRecords left readable, hot or cold.

    ``restored_from``: key of the object with the state of an internal topic's partition at the log's start, from a restore
    until the first ledger's checkpoint is durable; else empty.
    """

    topic_id: UUID
    index: int
    ledgers: tuple[LedgerRef, ...] = ()
    log_start_offset: int = 0
    restored_from: str = ""

    def key(self) -> str:
        return log_key(self.topic_id, self.index)


class ManifestPointer(RecordBase, frozen=True, kw_only=True, tag="manifest_pointer"):
    """The current manifest of a partition. A commit is a compare-and-set of this record.

    Offsets are of the cold history: ``start_offset`` inclusive, ``end_offset`` exclusive. ``sha256`` is the hex digest of the
    manifest object, which names its predecessor's digest. ``newest_ms`` is the greatest timestamp of a cold record (wall time;
    -1: unknown), so that retention works without the store. ``lock_until_ms`` is the wall time until which objects of the
    history may be locked, and ``lock_mode`` the strictest of their modes, ``governance`` or ``compliance``; 0 and empty: none.
    ``content`` is the whole manifest, as long as its object is not known to be in the store; a worker stores it right after the
    commit and then empties this member.
    ``erased_version`` is the newest version that erased records, 0 if none did: owners drop what they hold in memory then.
    """

    topic_id: UUID
    index: int
    manifest_version: int
    object_key: str
    sha256: str
    start_offset: int
    end_offset: int
    cold_bytes: int
    newest_ms: int = -1
    lock_until_ms: int = 0
    lock_mode: str = ""
    content: bytes = b""
    erased_version: int = 0

    def key(self) -> str:
        return manifest_pointer_key(self.topic_id, self.index)


class TierRequest(RecordBase, frozen=True, kw_only=True, tag="tier_request"):
    """A request to make everything below ``end_offset`` cold now (-1: everything up to when the owner sees it).

    The owner seals its open ledger and writes the sealed offset. Tiering offloads, deletes hot copies at once if
    ``delete_hot``, compacts the partition if ``compact``, and removes the fulfilled request.
    """

    topic_id: UUID
    index: int
    end_offset: int = -1
    delete_hot: bool = False
    compact: bool = False

    def key(self) -> str:
        return tier_request_key(self.topic_id, self.index)


class TierStatus(RecordBase, frozen=True, kw_only=True, tag="tier_status"):
    """The last result of tiering for a partition, for operators; overwritten in place.

    ``compacting`` is the phase of a compaction in progress (``map`` or ``rewrite``), empty without one: it has done what is
    below ``compacting_offset`` of ``compacting_end``. ``unrepaired`` are keys of objects that the continuous scrub found
    damaged and has not repaired: the last ones in their order, if they are many.
    """

    topic_id: UUID
    index: int
    worker_id: str
    offloaded_at_ms: int = 0
    last_error: str = ""
    last_error_at_ms: int = 0
    compacted_at_ms: int = 0
    compacting: str = ""
    compacting_offset: int = 0
    compacting_end: int = 0
    unrepaired: tuple[str, ...] = ()

    def key(self) -> str:
        return tier_status_key(self.topic_id, self.index)


class ForkDecision(RecordBase, frozen=True, kw_only=True, tag="fork_decision"):
    """An operator's decision which line of a forked history stays. Tiering carries it out and removes the record.

    If it cannot, it writes the reason to ``refused`` and leaves the fork. ``keep`` is ``metadata`` or ``store``. The keys name
    each line's newest manifest at the time of the decision (metadata's is empty if it knew none); the decision holds for no
    other fork. With ``discard_hot``, ledgers that do not continue the store's line are removed.
    """

    topic_id: UUID
    index: int
    keep: str
    metadata_key: str
    store_key: str
    discard_hot: bool = False
    decided_at_ms: int = 0
    decided_by: str = ""
    refused: str = ""

    @property
    def keeps_store(self) -> bool:
        return self.keep == KEEP_STORE

    def key(self) -> str:
        return fork_decision_key(self.topic_id, self.index)


def partition_key(topic_id: UUID, index: int) -> str:
    return f"partition/{topic_id.hex}/{index}"


def log_key(topic_id: UUID, index: int) -> str:
    return f"log/{topic_id.hex}/{index}"


def manifest_pointer_key(topic_id: UUID, index: int) -> str:
    return f"manifest_pointer/{topic_id.hex}/{index}"


def tier_request_key(topic_id: UUID, index: int) -> str:
    return f"tier_request/{topic_id.hex}/{index}"


def tier_status_key(topic_id: UUID, index: int) -> str:
    return f"tier_status/{topic_id.hex}/{index}"


def fork_decision_key(topic_id: UUID, index: int) -> str:
    return f"fork_decision/{topic_id.hex}/{index}"
