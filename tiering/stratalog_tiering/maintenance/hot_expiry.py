"""Removes hot ledgers that are past retention before they could be offloaded, while the store cannot be reached.

Without the store nothing becomes cold, and bookies would fill up without bound. A sealed ledger may go if every record in it is
past the topic's own retention, and so is all that is older: by time, or because what follows is as much as ``retention.bytes``
keeps. Nothing younger is touched. The log's start moves to the end of what goes, in the same command. The newest ledger stays
whatever its age, because it tells the next offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.checkpoint import is_checkpoint
from stratalog_metadata.records import Ledger
from stratalog_tiering.core.commands import Guards
from stratalog_tiering.core.planning import PartitionState, StoredLedger, is_sealed
from stratalog_tiering.core.policy import UNLIMITED, TierPolicy
from stratalog_tiering.offload.offloading import drop
from stratalog_tiering.offload.ports import WorkerPorts

_HEADS_AT_ONCE: Final = 8192


def expired_ledgers(
    state: PartitionState, policy: TierPolicy, newest_ms: Mapping[int, int], now_ms: int
) -> tuple[StoredLedger, ...]:
    """The oldest ledgers that may go. Pure; ``newest_ms`` is the time of the newest record of each ledger that is known."""
    cutoff_ms = now_ms - policy.retention_ms if policy.retention_ms != UNLIMITED else -1
    older_has_expired = _history_has_expired(state, cutoff_ms)
    bytes_after = sum(stored.ledger.payload_bytes for stored in state.ledgers)
    expired: list[StoredLedger] = []
    for stored in state.ledgers[:-1]:
        ledger = stored.ledger
        bytes_after -= ledger.payload_bytes
        too_much = policy.retention_bytes != UNLIMITED and bytes_after >= policy.retention_bytes
        too_old = older_has_expired and newest_ms.get(ledger.ledger_id, now_ms) < cutoff_ms
        if not is_sealed(ledger) or not (too_much or too_old):
            break
        older_has_expired = True
        expired.append(stored)
    return tuple(expired)


def _history_has_expired(state: PartitionState, cutoff_ms: int) -> bool:
    """Whether no cold record is left that retention by time keeps, as far as metadata tells."""
    pointer = state.pointer
    if pointer is None or pointer.end_offset <= max(pointer.start_offset, state.log.log_start_offset):
        return True
    return 0 <= pointer.newest_ms < cutoff_ms


@dataclass(slots=True)
class HotExpiry:
    """One partition's; remembers what it read of ledgers that stay."""

    _newest_ms: dict[int, int] = field(default_factory=dict)

    async def drop_expired(
        self, ports: WorkerPorts, state: PartitionState, policy: TierPolicy, guards: Guards
    ) -> Sequence[StoredLedger]:
        """Remove what may go; returns it. Raises ``Unavailable``, ``Conflict``, ``OutcomeUnknown``."""
        now_ms = ports.clock.wall_ms()
        if policy.retention_ms != UNLIMITED:
            await self._read_times(ports, state, now_ms - policy.retention_ms)
        expired = expired_ledgers(state, policy, self._newest_ms, now_ms)
        if expired:
            await drop(ports, state, expired, guards, expired[-1].ledger.end_offset)
        return expired

    async def _read_times(self, ports: WorkerPorts, state: PartitionState, cutoff_ms: int) -> None:
        """Of ledgers that were closed before ``cutoff_ms``, from the oldest on, until one has a newer record."""
        known = self._newest_ms
        self._newest_ms = {s.ledger.ledger_id: known[s.ledger.ledger_id] for s in state.ledgers if s.ledger.ledger_id in known}
        for ledger in (stored.ledger for stored in state.ledgers[:-1]):
            if not is_sealed(ledger) or ledger.closed_at_ms >= cutoff_ms:
                return
            if ledger.ledger_id not in self._newest_ms:
                self._newest_ms[ledger.ledger_id] = await _newest_record_ms(ports, ledger)
            if self._newest_ms[ledger.ledger_id] >= cutoff_ms:
                return


async def _newest_record_ms(ports: WorkerPorts, ledger: Ledger) -> int:
    """From the batches' headers; records without a time count from when the ledger was closed."""
    newest_ms = 0
    for first in range(0, ledger.last_entry + 1, _HEADS_AT_ONCE):
        for entry in await ports.ledgers.read_headers(ledger, first, min(first + _HEADS_AT_ONCE - 1, ledger.last_entry)):
            if not is_checkpoint(entry.head):
                timestamp_ms = read_header(entry.head).max_timestamp_ms
                newest_ms = max(newest_ms, timestamp_ms if timestamp_ms >= 0 else ledger.closed_at_ms)
    return newest_ms
