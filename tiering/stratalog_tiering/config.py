"""Settings of a tiering worker. The store's URL is a setting of the process, because brokers need it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stratalog_core.config import setting

SECTION: Final = "tiering"
_MIB: Final = 1024 * 1024
_HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringSettings:
    """One worker. The store's URL is ``[node] store``."""

    worker_id: str = setting(help="name of the worker, unique in the cluster")
    session_lease_ms: int = setting(
        10_000,
        help="time without a heartbeat after which the worker's leases are given to others",
        minimum=500,
        maximum=600_000,
    )
    partitions_at_once: int = setting(2, help="maximum number of partitions worked on at once", minimum=1, maximum=64)
    read_bytes_per_s: int = setting(
        200 * _MIB,
        help="maximum rate, in bytes per second over all partitions, at which the worker reads what it then uploads: ledgers"
        " from bookies, and segments from the store for merges, compaction and erasure. So it limits uploads, too",
        minimum=_MIB,
        maximum=100_000 * _MIB,
    )
    verify_bytes_per_s: int = setting(
        200 * _MIB,
        help="maximum rate at which uploaded segments are read back and verified, in bytes per second, over all partitions",
        minimum=_MIB,
        maximum=100_000 * _MIB,
    )
    verify: str = setting(
        "read",
        help="how a new segment is verified before its commit; read: all of it is read back; checksum: the CRC32C that the"
        " store keeps is compared with that of the bytes sent, where reads cost money. With checksum, the worker does not start"
        " on a store that keeps no CRC32C, or accepts bytes that do not match it",
        choices=("read", "checksum"),
    )
    niceness: int = setting(
        10,
        help="scheduling priority of the worker's process, as for nice(2); 0: normal priority",
        minimum=0,
        maximum=19,
    )
    read_chunk_bytes: int = setting(2 * _MIB, help="size of one read from a bookie", minimum=64 * 1024, maximum=32 * _MIB)
    upload_part_bytes: int = setting(
        8 * _MIB, help="size of the parts of a multipart upload", minimum=5 * _MIB, maximum=64 * _MIB
    )
    upload_parts_at_once: int = setting(4, help="parts of one segment uploaded at once", minimum=1, maximum=16)
    verify_reads_at_once: int = setting(
        4, help="blocks of one segment read back at once during verification", minimum=1, maximum=32
    )
    block_bytes: int = setting(_MIB, help="target size of a block", minimum=4096, maximum=16 * _MIB)
    segment_bytes: int = setting(
        256 * _MIB,
        help="target size of a segment that is made of several ledgers, unless the topic sets stratalog.tier.segment.bytes",
        minimum=1,
        maximum=16_384 * _MIB,
    )
    compaction_map_bytes: int = setting(
        128 * _MIB,
        help="memory of the map of keys of a compaction, 40 bytes for each key; one partition at a time has it",
        minimum=64 * 1024,
        maximum=64 * 1024 * _MIB,
    )
    deletion_lag_ms: int = setting(
        60_000,
        help="time after a segment's commit before its hot copy may be deleted, unless the topic sets local.retention.*",
        minimum=0,
        maximum=30 * 24 * _HOUR_MS,
    )
    grace_ms: int = setting(
        24 * _HOUR_MS,
        help="time for which objects stay after they left the manifest; must be longer than any read takes",
        minimum=0,
        maximum=365 * 24 * _HOUR_MS,
    )
    retention_interval_ms: int = setting(
        60_000,
        help="minimum time between two retention checks of a partition; an unchanged one is checked when something expires",
        minimum=10,
        maximum=24 * _HOUR_MS,
    )
    sweep_interval_ms: int = setting(
        7 * 24 * _HOUR_MS,
        help="interval at which a partition's orphaned objects are deleted",
        minimum=10,
        maximum=365 * 24 * _HOUR_MS,
    )
    copy_bytes_per_s: int = setting(
        50 * _MIB,
        help="maximum rate at which the second copy is written and read back, in bytes per second, over all partitions",
        minimum=64 * 1024,
        maximum=100_000 * _MIB,
    )
    copies_at_once: int = setting(
        2, help="maximum number of partitions that are copied to the second store at once", minimum=1, maximum=64
    )
    copy_grace_ms: int = setting(
        7 * 24 * _HOUR_MS,
        help="time for which the second copy keeps objects that its newest history does not need any more",
        minimum=0,
        maximum=365 * 24 * _HOUR_MS,
    )
    scrub_interval_ms: int = setting(
        0,
        help="time within which every byte of the history is read and checked once, and damage is repaired; 0: never",
        minimum=0,
        maximum=10 * 365 * 24 * _HOUR_MS,
    )
    scrub_bytes_per_s: int = setting(
        10 * _MIB,
        help="maximum rate at which a worker reads for this scrub, in bytes per second",
        minimum=64 * 1024,
        maximum=100_000 * _MIB,
    )
    deletes_per_s: int = setting(200, help="maximum number of objects deleted per second", minimum=1, maximum=100_000)
    retry_ms_max: int = setting(30_000, help="maximum pause after repeated failures", minimum=10, maximum=_HOUR_MS)
