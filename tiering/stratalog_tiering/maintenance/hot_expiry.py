"""Removes hot ledgers that have expired without being offloaded: the store cannot be reached, or copying is disabled.

Then nothing becomes cold, and the bookies would fill up without bound. A sealed ledger is removed only if every record in it,
and every older one, is past the topic's own retention or was deleted (``core/retention.py``); nothing younger is removed. The
log's start moves to the end of the removed ledgers in the same command. A later ledger must hold the partition's state, from
which the next owner starts; until one does, the newest ledger with records stays. See ADR 90 and ADR 122.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.checkpoint import is_checkpoint
from stratalog_metadata.records import Ledger
from stratalog_tiering.core.commands import Guards
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, has_records, is_sealed
from stratalog_tiering.core.policy import UNLIMITED, TierPolicy
from stratalog_tiering.core.retention import before_the_newest_records, expired_ledgers
from stratalog_tiering.offload.offloading import drop
from stratalog_tiering.offload.ports import WorkerPorts

_HEADS_AT_ONCE: Final = 8192


@dataclass(slots=True)
class HotExpiry:
    """Hot expiry of one partition. Caches the newest timestamps of ledgers that stay."""

    _newest_ms: dict[int, int] = field(default_factory=dict)

    async def drop_expired(
        self, ports: WorkerPorts, state: PartitionSnapshot, policy: TierPolicy, guards: Guards
    ) -> Sequence[StoredLedger]:
        """Remove the expired ledgers and return them. Raises ``Unavailable``, ``Conflict``, ``OutcomeUnknown``."""
        now_ms = ports.clock.wall_ms()
        if policy.retention_ms != UNLIMITED:
            await self._read_times(ports, state, now_ms - policy.retention_ms)
        expired = expired_ledgers(state, policy, self._newest_ms, now_ms)
        if expired and not await _hold_state(ports, state.ledgers[len(expired) :]):
            expired = before_the_newest_records(expired)
        if expired:
            await drop(ports, state, expired, guards, expired[-1].ledger.end_offset)
        return expired

    def next_ms(self, state: PartitionSnapshot, policy: TierPolicy) -> int | None:
        """Wall time from which the oldest ledger may expire by time, as far as its records' times were read; None: never."""
        oldest = state.ledgers[0].ledger if len(state.ledgers) > 1 else None
        if oldest is None or not is_sealed(oldest) or policy.retention_ms == UNLIMITED:
            return None
        return max(oldest.closed_at_ms, self._newest_ms.get(oldest.ledger_id, 0)) + policy.retention_ms + 1

    async def _read_times(self, ports: WorkerPorts, state: PartitionSnapshot, cutoff_ms: int) -> None:
        """Read the timestamps of ledgers closed before ``cutoff_ms``, oldest first, until one has a newer record."""
        known = self._newest_ms
        self._newest_ms = {s.ledger.ledger_id: known[s.ledger.ledger_id] for s in state.ledgers if s.ledger.ledger_id in known}
        for ledger in (stored.ledger for stored in state.ledgers[:-1]):
            if not is_sealed(ledger) or ledger.closed_at_ms >= cutoff_ms:
                return
            if ledger.ledger_id not in self._newest_ms:
                self._newest_ms[ledger.ledger_id] = await _newest_record_ms(ports, ledger)
            if self._newest_ms[ledger.ledger_id] >= cutoff_ms:
                return


async def _hold_state(ports: WorkerPorts, ledgers: Sequence[StoredLedger]) -> bool:
    """Whether one of the partition's newest ledgers holds its state for certain: it has records, an open one confirmed ones."""
    if any(has_records(stored.ledger) for stored in ledgers):
        return True
    newest = ledgers[-1].ledger
    if is_sealed(newest):
        return False
    lac = await ports.ledgers.read_lac(newest)
    heads = await ports.ledgers.read_headers(newest, lac, lac) if lac >= 0 else ()
    return any(not is_checkpoint(entry.head) for entry in heads)


async def _newest_record_ms(ports: WorkerPorts, ledger: Ledger) -> int:
    """The greatest timestamp of the batch headers; batches without one count from the ledger's close."""
    newest_ms = 0
    for first in range(0, ledger.last_entry + 1, _HEADS_AT_ONCE):
        for entry in await ports.ledgers.read_headers(ledger, first, min(first + _HEADS_AT_ONCE - 1, ledger.last_entry)):
            if not is_checkpoint(entry.head):
                timestamp_ms = read_header(entry.head).max_timestamp_ms
                newest_ms = max(newest_ms, timestamp_ms if timestamp_ms >= 0 else ledger.closed_at_ms)
    return newest_ms
