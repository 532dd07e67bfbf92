"""Retention rules: which cold segments and which hot ledgers have expired, and by which rule.

Segments and ledgers expire whole and oldest first; the first one that must stay ends the search, so offsets stay contiguous.
The rules are Kafka's: ``retention.ms`` counts from the greatest timestamp, ``retention.bytes`` bounds what remains of the
partition, and everything below the log's start (DeleteRecords) expires. Nothing younger than the topic's retention ever
expires, and nothing that is locked. No I/O: ``maintenance/retention.py`` and ``maintenance/hot_expiry.py`` apply the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, has_records, is_sealed
from stratalog_tiering.core.policy import UNLIMITED, TierPolicy
from stratalog_tiering.format.manifest import Manifest, Reason, SegmentEntry


def retained_bytes(state: PartitionSnapshot, manifest: Manifest) -> int:
    """Bytes of the partition that count towards ``retention.bytes``: each record once, cold or else hot.

    Ledgers that the manifest covers are not counted again while their hot copies remain. ``manifest`` must be the one that
    ``state`` points to.
    """
    hot = (stored.ledger for stored in state.ledgers if stored.ledger.base_offset >= manifest.end_offset)
    return manifest.cold_bytes + sum(ledger.payload_bytes for ledger in hot)


def expiry_reason(
    entry: SegmentEntry, policy: TierPolicy, *, total_bytes: int, log_start_offset: int, now_ms: int
) -> str | None:
    """The rule by which the partition's oldest segment has expired, or None if it must stay, as while it is locked.

    ``total_bytes`` is the size of the partition from this segment on, as :func:`retained_bytes` counts it. ``now_ms`` is wall
    time.
    """
    if entry.options.lock_until_ms > now_ms:
        return None
    if entry.end_offset <= log_start_offset:
        return Reason.LOG_START
    if policy.retention_ms != UNLIMITED and newest_ms(entry) < now_ms - policy.retention_ms:
        return Reason.RETENTION_MS
    if policy.retention_bytes != UNLIMITED and total_bytes - entry.stored_bytes >= policy.retention_bytes:
        return Reason.RETENTION_BYTES
    return None


def policy_of(reason: str, policy: TierPolicy, log_start_offset: int) -> str:
    """The setting by which a segment expired, with its value: ``retention.ms=604800000``."""
    values = {Reason.RETENTION_MS: policy.retention_ms, Reason.RETENTION_BYTES: policy.retention_bytes}
    return f"{reason}={values[reason]}" if reason in values else f"log start {log_start_offset}"


def newest_ms(entry: SegmentEntry) -> int:
    """Timestamp of a segment's newest record; the time of the upload if its records have no timestamps."""
    return entry.max_timestamp_ms if entry.max_timestamp_ms >= 0 else entry.created_at_ms


def oldest_ms(entry: SegmentEntry) -> int:
    """Timestamp of a segment's oldest record; if it is unknown, judged by the first record of each batch."""
    if entry.min_timestamp_ms is not None and entry.min_timestamp_ms >= 0:
        return entry.min_timestamp_ms
    return entry.first_timestamp_min_ms if entry.first_timestamp_min_ms >= 0 else newest_ms(entry)


def expired_ledgers(
    state: PartitionSnapshot, policy: TierPolicy, newest_ms: Mapping[int, int], now_ms: int
) -> tuple[StoredLedger, ...]:
    """The oldest hot ledgers that have expired and may be removed without being offloaded.

    One below the log's start has expired: its records were deleted. ``newest_ms`` is the timestamp of the newest record by
    ledger id; a ledger that is missing from it does not expire by time.
    The newest ledger never expires, because it determines the next offset. None does while older history is locked.
    """
    if state.pointer is not None and state.pointer.lock_until_ms > now_ms:
        return ()
    cutoff_ms = now_ms - policy.retention_ms if policy.retention_ms != UNLIMITED else -1
    older_has_expired = _history_has_expired(state, cutoff_ms)
    bytes_after = sum(stored.ledger.payload_bytes for stored in state.ledgers)
    expired: list[StoredLedger] = []
    for stored in state.ledgers[:-1]:
        ledger = stored.ledger
        bytes_after -= ledger.payload_bytes
        too_much = policy.retention_bytes != UNLIMITED and bytes_after >= policy.retention_bytes
        too_old = older_has_expired and newest_ms.get(ledger.ledger_id, now_ms) < cutoff_ms
        is_deleted = ledger.end_offset <= state.log.log_start_offset
        if not is_sealed(ledger) or not (too_much or too_old or is_deleted):
            break
        older_has_expired = True
        expired.append(stored)
    return tuple(expired)


def before_the_newest_records(expired: Sequence[StoredLedger]) -> tuple[StoredLedger, ...]:
    """The part of ``expired`` that may go although no later ledger holds the partition's state.

    Every ledger begins with the state of producers, transactions and leader epochs, and the next owner starts from the newest
    one. A ledger whose owner crashed may lack it; one with records has it. The newest one with records therefore stays.
    """
    with_records = [place for place, stored in enumerate(expired) if has_records(stored.ledger)]
    return tuple(expired[: with_records[-1]]) if with_records else ()


def _history_has_expired(state: PartitionSnapshot, cutoff_ms: int) -> bool:
    """Whether metadata proves that no cold record is younger than ``cutoff_ms``."""
    pointer = state.pointer
    if pointer is None or pointer.end_offset <= max(pointer.start_offset, state.log.log_start_offset):
        return True
    return 0 <= pointer.newest_ms < cutoff_ms
