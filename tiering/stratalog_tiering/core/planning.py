"""What to do next for a partition, decided from metadata alone. Pure.

The order is: drop empty ledgers, offload what is sealed, drop hot copies whose time has come, fulfil a request. A
ledger is offloaded only from exactly where the manifest ends, so neither gap nor overlap can arise; a hot copy goes
only when the manifest that metadata points to holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_core.errors import Corrupt
from stratalog_metadata.records import ForkDecision, Ledger, LedgerState, Log, ManifestPointer, TierRequest, Topic
from stratalog_tiering.core.policy import TierPolicy

LEDGERS_PER_SEGMENT_MAX: Final = 64
DROPS_AT_ONCE_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A record's version beside the record, for the requirements of a command."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLedger(Stored):
    ledger: Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionState:
    """One partition in metadata at one moment. ``ledgers`` are those of ``log``, in order. Version 0: there is none."""

    topic: Topic
    log: Log
    log_version: int
    ledgers: tuple[StoredLedger, ...]
    pointer: ManifestPointer | None
    pointer_version: int
    request: TierRequest | None
    request_version: int
    fork_decision: ForkDecision | None = None
    fork_decision_version: int = 0

    @property
    def pending_decision(self) -> ForkDecision | None:
        """How to resolve a fork, if somebody has decided and it was not found impossible."""
        return self.fork_decision if self.fork_decision is not None and not self.fork_decision.refused else None

    @property
    def cold_end(self) -> int:
        """Where the manifest ends, or will begin: at the first ledger if retention has removed all that was before it."""
        if self.pointer is not None:
            end_offset = self.pointer.end_offset
            hot = (stored.ledger.base_offset for stored in self.ledgers if not is_cold(self, stored.ledger))
            first_hot = next(hot, end_offset)
            return first_hot if end_offset < first_hot <= self.log.log_start_offset else end_offset
        return self.log.ledgers[0].base_offset if self.log.ledgers else self.log.log_start_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class DropEmpty:
    """Ledgers without a record leave the log; there is nothing to copy."""

    ledgers: tuple[StoredLedger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Neighbouring sealed ledgers become one segment."""

    ledgers: tuple[StoredLedger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropHot:
    """Hot copies go, if their cold copies still verify."""

    ledgers: tuple[StoredLedger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fulfil:
    """The request is done: remove it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveFork:
    """Somebody has decided which line of a forked history stays. Before anything else, and whatever the manifests say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Nothing to do before ``until_ms`` (wall time; None: before metadata changes)."""

    until_ms: int | None = None


Step = ResolveFork | DropEmpty | Offload | DropHot | Fulfil | Idle


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    segment_bytes: int
    deletion_lag_ms: int


def next_step(
    state: PartitionState, policy: TierPolicy, limits: PlanLimits, cold_since_ms: Mapping[int, int], now_ms: int
) -> Step:
    """``cold_since_ms`` tells, by ledger id, when the manifest that covers a ledger was committed.

    Raises ``Corrupt`` if ledgers and manifest do not meet: then nothing may be done but to tell people.
    """
    empty = tuple(_droppable_empty(state))
    if empty:
        return DropEmpty(ledgers=empty[:DROPS_AT_ONCE_MAX])
    run = _sealed_run(state, policy, limits.segment_bytes)
    if run:
        return Offload(ledgers=run)
    hot, until_ms = _expired_hot(state, policy, limits, cold_since_ms, now_ms)
    if hot:
        return DropHot(ledgers=hot[:DROPS_AT_ONCE_MAX])
    if state.request is not None and _is_fulfilled(state, state.request):
        return Fulfil()
    return Idle(until_ms=until_ms)


def is_sealed(ledger: Ledger) -> bool:
    return ledger.state is LedgerState.CLOSED


def is_cold(state: PartitionState, ledger: Ledger) -> bool:
    """Whether the committed manifest holds all of a sealed ledger (or held it, before retention)."""
    return state.pointer is not None and is_sealed(ledger) and ledger.end_offset <= state.pointer.end_offset


def decided_end(ledger: Ledger) -> int:
    """Offset below which all of a sealed ledger's transactions are decided: all of it, while there are no transactions.

    Once there are, the checkpoint that begins the next ledger tells, and a ledger is offloaded when this is its end.
    """
    return ledger.end_offset


def _droppable_empty(state: PartitionState) -> Iterator[StoredLedger]:
    """Sealed ledgers without records whose offset something else remembers: a later ledger, the manifest, or zero."""
    for position, stored in enumerate(state.ledgers):
        ledger = stored.ledger
        if is_sealed(ledger) and ledger.end_offset == ledger.base_offset:
            later = position + 1 < len(state.ledgers)
            if later or ledger.base_offset == 0 or (state.pointer is not None and state.cold_end == ledger.base_offset):
                yield stored


def _sealed_run(state: PartitionState, policy: TierPolicy, segment_bytes: int) -> tuple[StoredLedger, ...]:
    """Sealed ledgers from the manifest's end on that become one segment: as many as size and retention allow."""
    run: list[StoredLedger] = []
    bytes_max, span_ms = policy.segment_bytes_max(segment_bytes), policy.segment_span_ms
    total_bytes, expected = 0, state.cold_end
    for stored in state.ledgers:
        ledger = stored.ledger
        if is_cold(state, ledger):
            continue
        if ledger.base_offset != expected:
            raise Corrupt(
                f"ledger {ledger.ledger_id} begins at offset {ledger.base_offset} where {expected} was expected: "
                "cold and hot history do not meet"
            )
        if not is_sealed(ledger) or decided_end(ledger) < ledger.end_offset or ledger.end_offset == ledger.base_offset:
            break
        total_bytes += ledger.payload_bytes
        # The first ledger was open for ``segment.ms`` at most before it was closed.
        too_long = run and span_ms is not None and _closed_apart_ms(run[0].ledger, ledger) > span_ms - policy.segment_ms
        if run and (total_bytes > bytes_max or len(run) == LEDGERS_PER_SEGMENT_MAX or too_long):
            break
        run.append(stored)
        expected = ledger.end_offset
    return tuple(run)


def _closed_apart_ms(first: Ledger, later: Ledger) -> int:
    return later.closed_at_ms - first.closed_at_ms


def _expired_hot(
    state: PartitionState, policy: TierPolicy, limits: PlanLimits, cold_since_ms: Mapping[int, int], now_ms: int
) -> tuple[tuple[StoredLedger, ...], int | None]:
    """Hot copies from the oldest on that may go now, and when the next one may."""
    expired: list[StoredLedger] = []
    for stored in state.ledgers:
        if not is_cold(state, stored.ledger):
            break
        until_ms = _kept_until_ms(state, stored.ledger, policy, limits, cold_since_ms)
        if until_ms is None or until_ms > now_ms:
            return tuple(expired), until_ms
        expired.append(stored)
    return tuple(expired), None


def _kept_until_ms(
    state: PartitionState, ledger: Ledger, policy: TierPolicy, limits: PlanLimits, cold_since_ms: Mapping[int, int]
) -> int | None:
    asked = state.request is not None and state.request.delete_hot and ledger.base_offset < state.request.end_offset
    if asked or ledger.end_offset <= state.log.log_start_offset:
        return 0
    since_ms = cold_since_ms[ledger.ledger_id]
    return policy.hot_copy_kept_until_ms(ledger.closed_at_ms, since_ms, limits.deletion_lag_ms)


def _is_fulfilled(state: PartitionState, request: TierRequest) -> bool:
    if request.end_offset < 0 or request.end_offset > state.cold_end:
        return False
    hot_left = any(stored.ledger.base_offset < request.end_offset for stored in state.ledgers)
    return not (request.delete_hot and hot_left)
