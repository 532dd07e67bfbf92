"""Settings of a tiering worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stratalog_core.config import setting

SECTION: Final = "tiering"
_MIB: Final = 1024 * 1024
_HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringSettings:
    """One worker. Where the store is, the process says (``[node] store``), for brokers need it too."""

    worker_id: str = setting(help="name of this worker, unique in the cluster")
    session_lease_ms: int = setting(
        10_000, help="silence after which the worker's leases go to others", minimum=500, maximum=600_000
    )
    partitions_at_once: int = setting(2, help="partitions worked on at once", minimum=1, maximum=64)
    read_bytes_per_s: int = setting(
        200 * _MIB, help="most bytes a second read from bookies, all partitions together", minimum=_MIB, maximum=100_000 * _MIB
    )
    niceness: int = setting(
        10,
        help="how far the worker gives way to other processes of its machine, as of nice(2); 0: not at all",
        minimum=0,
        maximum=19,
    )
    read_chunk_bytes: int = setting(2 * _MIB, help="bytes asked of a bookie at once", minimum=64 * 1024, maximum=32 * _MIB)
    upload_part_bytes: int = setting(8 * _MIB, help="size of a part of an upload", minimum=5 * _MIB, maximum=64 * _MIB)
    upload_parts_at_once: int = setting(4, help="parts of one segment on their way at once", minimum=1, maximum=16)
    verify_reads_at_once: int = setting(4, help="blocks of one segment read back at once", minimum=1, maximum=32)
    block_bytes: int = setting(_MIB, help="size at which a block ends", minimum=4096, maximum=16 * _MIB)
    segment_bytes: int = setting(
        256 * _MIB, help="neighbouring ledgers go into one segment up to this size", minimum=1, maximum=16_384 * _MIB
    )
    deletion_lag_ms: int = setting(
        60_000, help="time after a segment's commit before its hot copy may go", minimum=0, maximum=30 * 24 * _HOUR_MS
    )
    grace_ms: int = setting(
        24 * _HOUR_MS,
        help="time for which objects stay after they stop counting; longer than any reader's work",
        minimum=0,
        maximum=365 * 24 * _HOUR_MS,
    )
    retention_interval_ms: int = setting(
        60_000,
        help="least time between two checks of a partition's retention; an unchanged one is checked when something expires",
        minimum=10,
        maximum=24 * _HOUR_MS,
    )
    sweep_interval_ms: int = setting(
        24 * _HOUR_MS,
        help="interval at which a partition's orphaned objects are looked for",
        minimum=10,
        maximum=365 * 24 * _HOUR_MS,
    )
    deletes_per_s: int = setting(200, help="most objects deleted a second", minimum=1, maximum=100_000)
    retry_ms_max: int = setting(30_000, help="longest pause after repeated failures", minimum=10, maximum=_HOUR_MS)
