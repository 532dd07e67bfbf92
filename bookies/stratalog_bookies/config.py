"""Settings of a bookie. Section ``[bookie]`` of the configuration file, ``STRATALOG_BOOKIE_*`` in the environment."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.config import setting
from stratalog_core.errors import Invalid

SECTION = "bookie"
_MEBIBYTE = 1024 * 1024
_GIBIBYTE = 1024 * _MEBIBYTE
MAINTENANCE_CALLS = 3
"""Threads of each disk for its log files, compaction and scrub."""
LOOKS_MAX = 10
"""Looks at a disk within ``disk_stall_ms``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieSettings:
    """Settings of one bookie. Raises ``Invalid`` for values that do not fit together."""

    bookie_id: str = setting(help="name of the bookie, unique in the cluster and permanently tied to its disks")
    data_dirs: tuple[str, ...] = setting(help="directories, one per disk; their number never changes")
    listen: str = setting("127.0.0.1:0", help="HOST:PORT to serve; port 0 takes any free port")
    advertised: str = setting("", help="HOST:PORT published to clients; empty: the listening address")
    rack: str = setting("", help="rack, zone or other failure domain; copies are spread over different ones where possible")
    host: str = setting(
        "",
        help="machine of the bookie; copies are spread over different ones where possible; empty: the advertised host",
    )
    lease_ms: int = setting(
        10_000, minimum=500, maximum=300_000, help="silence after which the bookie counts as dead (milliseconds)"
    )
    log_file_bytes: int = setting(
        64 * _MEBIBYTE,
        minimum=64 * 1024,
        maximum=_GIBIBYTE,
        help="size of a log file (bytes). One ADD of a client must fit into it: [ledgers] request_bytes_max, or a larger entry,"
        " 33 bytes for each entry, and 8 KiB",
    )
    spare_files: int = setting(
        4, minimum=0, maximum=1000, help="prewritten log files kept ready on each disk: overwriting beats appending"
    )
    direct_io: bool = setting(
        True,
        help="write logs around the page cache, for half the CPU; false: recent entries are read from memory",
    )
    direct_read_bytes_min: int = setting(
        64 * 1024,
        minimum=512,
        help="a READ of at least this much payload (bytes) bypasses the page cache if logs are written so",
    )
    disk_stall_ms: int = setting(
        30_000,
        minimum=100,
        help="a disk that completes nothing for this long is refused adds, fences and reads until it does (milliseconds)",
    )
    in_flight_bytes_max: int = setting(
        128 * _MEBIBYTE,
        minimum=_MEBIBYTE,
        help="adds that may wait for the disks (bytes), the same share for each; further ones are answered OVERLOADED",
    )
    read_bytes_max: int = setting(
        16 * _MEBIBYTE, minimum=1024, maximum=60 * _MEBIBYTE, help="payload in one answer to a READ (bytes)"
    )
    requests_max: int = setting(
        1024, minimum=1, help="requests other than adds that may wait (requests); further ones are refused and retried"
    )
    lac_waiters_max: int = setting(
        1000,
        minimum=0,
        help="readers of open ledgers that may wait for a greater LAC (requests); further ones are refused and retried",
    )
    read_jobs: int = setting(4, minimum=1, maximum=64, help="concurrent reads of one disk (threads)")
    index_bytes_max: int = setting(
        128 * _MEBIBYTE, minimum=0, help="memory for index rows of closed log files, per disk (bytes); 32 per entry"
    )
    ledgers_max: int = setting(1_000_000, minimum=1, help="ledgers on one disk; adds to further ones are answered OVERLOADED")
    tombstones_max: int = setting(
        262_144, minimum=1, help="deleted ledgers that each disk remembers in order to refuse late adds"
    )
    free_bytes_min: int = setting(
        512 * _MEBIBYTE, minimum=0, help="space kept free on each disk (bytes); below it adds are refused and reads served"
    )
    free_bytes_low: int = setting(
        2048 * _MEBIBYTE,
        minimum=0,
        help="free space of a disk (bytes) below which tiering workers drop hot copies that are cold, too, without waiting for"
        " their time; 0: never",
    )
    collect_interval_s: float = setting(
        60.0, minimum=0.05, help="pause between collections of ledgers that metadata no longer has (seconds)"
    )
    compaction_live_ratio: float = setting(
        0.4, minimum=0.0, maximum=0.9, help="a log file with a smaller share of live bytes is rewritten and freed; 0: never"
    )
    compaction_bytes_per_s: int = setting(32 * _MEBIBYTE, minimum=1024, help="maximum rate of compaction (bytes per second)")
    scrub_bytes_per_s: int = setting(
        8 * _MEBIBYTE, minimum=0, help="maximum read rate of the scrub (bytes per second); 0: no scrub"
    )
    scrub_interval_s: float = setting(86_400.0, minimum=0.05, help="pause between two scrubs of a disk (seconds)")
    audit_delay_s: float = setting(
        600.0,
        minimum=0.0,
        help="a bookie that is down for longer has its copies restored elsewhere (seconds); 0: this one never audits",
    )
    audit_interval_s: float = setting(30.0, minimum=0.02, help="pause between two audits (seconds)")
    audit_bytes_per_s: int = setting(
        32 * _MEBIBYTE, minimum=1024, help="maximum rate at which the auditor copies between bookies (bytes per second)"
    )

    def __post_init__(self) -> None:
        if not self.bookie_id or "/" in self.bookie_id:
            raise Invalid(f"bookie_id {self.bookie_id!r} must be non-empty and without '/'")
        if not self.data_dirs:
            raise Invalid("data_dirs is empty: name at least one directory")

    @property
    def threads(self) -> int:
        """Threads that ``Background`` needs, so that neither reads and maintenance nor another disk delay a commit."""
        return len(self.data_dirs) * (self.read_jobs + MAINTENANCE_CALLS + 1)
