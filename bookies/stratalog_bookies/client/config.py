"""Settings of the ledger client. They bound all of its memory."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.config import setting

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerClientSettings:
    """Times in milliseconds, sizes in bytes."""

    held_bytes_max: int = setting(
        128 * _MIB,
        minimum=_MIB,
        help="payload bytes that all writers hold, because not all bookies that get a copy have answered; above it further"
        " appends are refused for now",
    )
    request_bytes_max: int = setting(
        16 * _MIB, minimum=64 * 1024, maximum=32 * _MIB, help="payload bytes of one ADD; a single entry may be larger"
    )
    request_entries_max: int = setting(8192, minimum=1, maximum=65_536, help="entries of one ADD")
    bookie_in_flight_bytes_max: int = setting(
        64 * _MIB, minimum=_MIB, help="payload bytes in flight to one bookie; the rest is queued"
    )
    tick_ms: int = setting(100, minimum=10, maximum=1000, help="interval of time-out checks and of explicit LACs")
    bookie_silence_ms: int = setting(
        800, minimum=50, help="a bookie that has adds to answer and confirms none for this long has failed"
    )
    bookie_avoid_ms: int = setting(1000, minimum=10, help="a failed bookie is avoided for this long; doubles up to the maximum")
    bookie_avoid_ms_max: int = setting(30_000, minimum=10, help="longest time to avoid a bookie that keeps failing")
    confirm_deadline_ms: int = setting(
        30_000, minimum=100, help="a writer that has no entry confirmed for this long fails with OutcomeUnknown"
    )
    request_timeout_ms: int = setting(10_000, minimum=100, help="time for one request to a bookie, adds included")
    hedge_delay_ms: int = setting(
        250, minimum=1, help="a read that is not answered after this time is sent to one more replica"
    )
    read_deadline_ms: int = setting(10_000, minimum=100, help="time for a read over all replicas")
    recovery_deadline_ms: int = setting(30_000, minimum=100, help="time for recovering one batch of ledgers")
    recovery_retry_ms: int = setting(250, minimum=10, help="a recovery asks failed bookies again after this time")
    ledger_id_block: int = setting(100, minimum=1, maximum=100_000, help="ledger ids taken from the quorum at a time")
