"""The next step of a partition, decided from metadata alone.

Steps in order: drop empty ledgers, offload sealed ones if the topic's policy allows it, drop hot copies whose time has come,
fulfil a request. A ledger is offloaded only if it begins exactly where the manifest ends, so segments never overlap and never
leave a gap, however long copying was disabled, and only when every transaction that began in it or before is decided: a segment
tells which of its records were aborted. A hot copy is dropped only if the committed manifest covers all of it. No I/O;
``worker/partition_work.py`` carries the steps out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_core.errors import Corrupt
from stratalog_metadata.records import NONE_UNDECIDED, UNKNOWN_UNDECIDED, Ledger, TierRequest
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, has_records, is_cold, is_sealed
from stratalog_tiering.core.policy import TierPolicy

LEDGERS_PER_SEGMENT_MAX: Final = 64
DROPS_AT_ONCE_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DropEmpty:
    """Remove sealed ledgers without records from the log."""

    ledgers: tuple[StoredLedger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Make one segment of neighbouring sealed ledgers.

    ``following``: the sealed ledgers after them, where transactions end that are open at the end of the last one.
    """

    ledgers: tuple[StoredLedger, ...]
    following: tuple[StoredLedger, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DropHot:
    """Delete hot copies, if their cold copies still verify."""

    ledgers: tuple[StoredLedger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fulfil:
    """Remove the tier request: it has been carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveFork:
    """Carry out the operator's decision on a forked history. It comes before every other step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Do nothing before ``until_ms`` (wall time), or before metadata changes (None)."""

    until_ms: int | None = None


Step = ResolveFork | DropEmpty | Offload | DropHot | Fulfil | Idle


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """The worker's settings that planning depends on."""

    segment_bytes: int
    deletion_lag_ms: int
    bookies_low_on_space: frozenset[str] = frozenset()
    """A verified cold copy lets a hot copy on one of these go at once, whatever the policy says."""


def next_step(
    state: PartitionSnapshot,
    policy: TierPolicy,
    limits: PlanLimits,
    cold_since_ms: Mapping[int, int],
    now_ms: int,
    open_since: int | None = None,
) -> Step:
    """The next step for ``state``.

    ``cold_since_ms`` is the wall time from which each cold ledger has been in the store, by ledger id; the hot copy of one that
    is missing from it stays. ``open_since`` is the first offset of a transaction that an attempt to offload found open after
    the last sealed ledger.
    Raises ``Corrupt`` if the hot ledgers do not continue the manifest: no step is safe then.
    """
    empty = tuple(_droppable_empty(state))
    if empty:
        return DropEmpty(ledgers=empty[:DROPS_AT_ONCE_MAX])
    run = _sealed_run(state, policy, limits.segment_bytes, open_since)
    if run and policy.is_copied:
        return Offload(ledgers=run, following=following_ledgers(state, run[-1].ledger))
    hot, until_ms = _expired_hot(state, policy, limits, cold_since_ms, now_ms)
    if hot:
        return DropHot(ledgers=hot[:DROPS_AT_ONCE_MAX])
    if state.request is not None and _is_fulfilled(state, state.request):
        return Fulfil()
    return Idle(until_ms=until_ms)


def may_be_decided(state: PartitionSnapshot, ledger: Ledger) -> bool:
    """Whether no transaction is open that began before the end of a sealed ledger, as far as metadata tells.

    Each owner records with a ledger which transaction is open at its end, and with later ledgers whether that is still so.
    Recovery does not know; whether a transaction is open then is found out by an attempt.
    """
    later = (stored.ledger for stored in _from(state, ledger) if is_sealed(stored.ledger))
    told = [one.undecided_from for one in later]
    if any(first == NONE_UNDECIDED or first >= ledger.end_offset for first in told):
        return True
    return UNKNOWN_UNDECIDED in told


def _from(state: PartitionSnapshot, ledger: Ledger) -> Iterator[StoredLedger]:
    return (stored for stored in state.ledgers if stored.ledger.base_offset >= ledger.base_offset)


def following_ledgers(state: PartitionSnapshot, last: Ledger) -> tuple[StoredLedger, ...]:
    """The sealed ledgers with records after ``last``; none if it says that no transaction is open at its end.

    One without records decides nothing, and its checkpoint may be incomplete: its owner died.
    """
    if last.undecided_from == NONE_UNDECIDED:
        return ()
    return tuple(stored for stored in _from(state, last) if stored.ledger is not last and has_records(stored.ledger))


def _droppable_empty(state: PartitionSnapshot) -> Iterator[StoredLedger]:
    """Sealed ledgers without records, if their offset and the state of producers there are known from elsewhere.

    That is so at offset zero, at the manifest's end, and beside a ledger with records. If retention has removed all records
    after the manifest's end, the checkpoint of the empty ledger may be the only state that tells who wrote them.
    """
    known_offset = state.pointer.end_offset if state.pointer is not None else 0
    with_records = [position for position, stored in enumerate(state.ledgers) if has_records(stored.ledger)]
    newest = len(state.ledgers) - 1
    for position, stored in enumerate(state.ledgers):
        ledger = stored.ledger
        if is_sealed(ledger) and ledger.end_offset == ledger.base_offset:
            is_known = with_records and position < newest
            if is_known or ledger.base_offset in (0, known_offset):
                yield stored


def _sealed_run(
    state: PartitionSnapshot, policy: TierPolicy, segment_bytes: int, open_since: int | None
) -> tuple[StoredLedger, ...]:
    """Sealed ledgers from the manifest's end on that make one segment: as many as segment size and retention allow."""
    run: list[StoredLedger] = []
    bytes_max, span_ms = policy.segment_bytes_max(segment_bytes), policy.segment_span_ms
    total_bytes, expected = 0, state.cold_end
    for stored in state.ledgers:
        ledger = stored.ledger
        if is_cold(state, ledger):
            continue
        if ledger.base_offset != expected:
            raise Corrupt(
                f"ledger {ledger.ledger_id} begins at offset {ledger.base_offset}; expected {expected}: "
                "cold and hot history do not meet"
            )
        if not is_sealed(ledger) or ledger.end_offset == ledger.base_offset:
            break
        if (open_since is not None and ledger.end_offset > open_since) or not may_be_decided(state, ledger):
            break
        total_bytes += ledger.payload_bytes
        # The first ledger was open for at most ``segment.ms`` before it was closed.
        too_long = run and span_ms is not None and _closed_apart_ms(run[0].ledger, ledger) > span_ms - policy.segment_ms
        if run and (total_bytes > bytes_max or len(run) == LEDGERS_PER_SEGMENT_MAX or too_long):
            break
        run.append(stored)
        expected = ledger.end_offset
    return tuple(run)


def _closed_apart_ms(first: Ledger, later: Ledger) -> int:
    return later.closed_at_ms - first.closed_at_ms


def _expired_hot(
    state: PartitionSnapshot, policy: TierPolicy, limits: PlanLimits, cold_since_ms: Mapping[int, int], now_ms: int
) -> tuple[tuple[StoredLedger, ...], int | None]:
    """The oldest hot copies that may be dropped now, and the wall time from which the next one may."""
    expired: list[StoredLedger] = []
    newer_bytes = sum(stored.ledger.payload_bytes for stored in state.ledgers)
    for stored in state.ledgers:
        if not is_cold(state, stored.ledger):
            break
        newer_bytes -= stored.ledger.payload_bytes
        until_ms = _kept_until_ms(state, stored.ledger, policy, limits, cold_since_ms, newer_bytes)
        if until_ms is None or until_ms > now_ms:
            return tuple(expired), until_ms
        expired.append(stored)
    return tuple(expired), None


def _kept_until_ms(
    state: PartitionSnapshot,
    ledger: Ledger,
    policy: TierPolicy,
    limits: PlanLimits,
    cold_since_ms: Mapping[int, int],
    newer_hot_bytes: int,
) -> int | None:
    asked = state.request is not None and state.request.delete_hot and ledger.base_offset < state.request.end_offset
    if asked or ledger.end_offset <= state.log.log_start_offset or _is_in_the_way(ledger, limits.bookies_low_on_space):
        return 0
    since_ms = cold_since_ms.get(ledger.ledger_id)
    if since_ms is None:
        return None
    return policy.hot_copy_kept_until_ms(ledger.closed_at_ms, since_ms, limits.deletion_lag_ms, newer_hot_bytes)


def _is_in_the_way(ledger: Ledger, bookies_low_on_space: frozenset[str]) -> bool:
    """Whether the ledger has entries on a bookie whose space is short."""
    return any(not bookies_low_on_space.isdisjoint(fragment.bookies) for fragment in ledger.fragments)


def _is_fulfilled(state: PartitionSnapshot, request: TierRequest) -> bool:
    if request.end_offset < 0 or request.end_offset > state.cold_end:
        return False
    hot_left = any(stored.ledger.base_offset < request.end_offset for stored in state.ledgers)
    return not (request.delete_hot and hot_left)
