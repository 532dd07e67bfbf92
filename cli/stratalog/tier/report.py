"""Reports the hot and the cold part of each partition, from metadata. Pure: a view in, rows out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stratalog_core.errors import NotFound
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    Ledger,
    LedgerState,
    Log,
    ManifestPointer,
    TierRequest,
    TierStatus,
    Topic,
    ledger_key,
    log_key,
    manifest_pointer_key,
    tier_request_key,
    tier_status_key,
    topic_key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTier:
    """One partition. Start offsets are inclusive, end offsets exclusive. ``hot_bytes`` counts sealed ledgers only.

    ``lag_records`` counts records in sealed ledgers that are not yet cold. ``lock_until_ms`` is the wall time until which
    objects of the cold part are locked, 0 if they are not. ``compacted_at_ms`` is the end of the last compaction, 0 without
    any; ``compacting`` is the phase of one in progress (``map`` or ``rewrite``), which has done what is below
    ``compacting_offset`` of ``compacting_end``. ``undecided_from`` is the first offset of the open transaction for which
    offloading waits, -1 if it waits for none. ``unrepaired`` are keys of objects that the continuous scrub found damaged and
    could not repair.
    """

    topic: str
    partition: int
    log_start_offset: int
    cold_start_offset: int
    cold_end_offset: int
    cold_bytes: int
    manifest_version: int
    hot_ledgers: int
    open_ledgers: int
    hot_bytes: int
    lag_records: int
    undecided_from: int
    requested: bool
    offloaded_at_ms: int
    last_error: str
    lock_mode: str
    lock_until_ms: int
    compacted_at_ms: int
    compacting: str
    compacting_offset: int
    compacting_end: int
    unrepaired: tuple[str, ...]


def topics_named(view: MetadataView, names: Iterable[str]) -> list[Topic]:
    """Return the topics of these names, or all but internal ones if ``names`` is empty. Raises ``NotFound``."""
    wanted = list(names)
    if not wanted:
        return [topic for topic in view.all(Topic) if not topic.internal]
    topics = {name: view.find(Topic, topic_key(name)) for name in wanted}
    for name, topic in topics.items():
        if topic is None:
            raise NotFound(f"no topic {name!r}: see `stratalog topic list`")
    return [topic for topic in topics.values() if topic is not None]


def tier_report(view: MetadataView, topics: Iterable[Topic]) -> list[PartitionTier]:
    """Return one row per partition of ``topics``, in order."""
    return [_partition(view, topic, index) for topic in topics for index in range(topic.partition_count)]


def _partition(view: MetadataView, topic: Topic, index: int) -> PartitionTier:
    log = view.find(Log, log_key(topic.topic_id, index)) or Log(topic_id=topic.topic_id, index=index)
    pointer = view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, index))
    status = view.find(TierStatus, tier_status_key(topic.topic_id, index))
    ledgers = [ledger for ref in log.ledgers if (ledger := view.find(Ledger, ledger_key(ref.ledger_id))) is not None]
    closed = [ledger for ledger in ledgers if ledger.state is LedgerState.CLOSED]
    cold_end = pointer.end_offset if pointer else log.log_start_offset
    sealed_end = max((ledger.end_offset for ledger in closed), default=cold_end)
    return PartitionTier(
        topic=topic.name,
        partition=index,
        log_start_offset=log.log_start_offset,
        cold_start_offset=pointer.start_offset if pointer else cold_end,
        cold_end_offset=cold_end,
        cold_bytes=pointer.cold_bytes if pointer else 0,
        manifest_version=pointer.manifest_version if pointer else 0,
        hot_ledgers=len(ledgers),
        open_ledgers=len(ledgers) - len(closed),
        hot_bytes=sum(ledger.payload_bytes for ledger in closed),
        lag_records=max(0, sealed_end - cold_end),
        undecided_from=_undecided_from(closed, cold_end),
        requested=view.get(tier_request_key(topic.topic_id, index)) is not None,
        offloaded_at_ms=status.offloaded_at_ms if status else 0,
        last_error=status.last_error if status else "",
        lock_mode=pointer.lock_mode if pointer else "",
        lock_until_ms=pointer.lock_until_ms if pointer else 0,
        compacted_at_ms=status.compacted_at_ms if status else 0,
        compacting=status.compacting if status else "",
        compacting_offset=status.compacting_offset if status else 0,
        compacting_end=status.compacting_end if status else 0,
        unrepaired=status.unrepaired if status else (),
    )


def _undecided_from(closed: list[Ledger], cold_end: int) -> int:
    """Return the first offset of the transaction that is open at the end of all sealed ledgers that are not cold."""
    last = closed[-1] if closed and closed[-1].end_offset > cold_end else None
    return last.undecided_from if last is not None and last.undecided_from >= 0 else -1


def open_requests(view: MetadataView, topic: Topic) -> list[TierRequest]:
    """Offload requests of this topic that are not fulfilled yet."""
    return [request for request in view.all(TierRequest) if request.topic_id == topic.topic_id]
