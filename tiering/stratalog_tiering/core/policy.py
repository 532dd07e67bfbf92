"""The tiering policy in a topic's configuration, under Kafka's names. Other keys are ignored. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_core.object_lock import LockMode
from stratalog_metadata.records import is_hot_only
from stratalog_metadata.topic_rules.cleanup_policy import COMPACT, DELETE, cleanup_policies
from stratalog_metadata.topic_rules.tier_topic_configs import EXPIRY_HEADER
from stratalog_tiering.format.footer import NONE, ZSTD

SEVEN_DAYS_MS: Final = 7 * 24 * 3_600_000
UNLIMITED: Final = -1
LIKE_RETENTION: Final = -2
HOUR_MS: Final = 3_600_000
ZSTD_LEVEL: Final = 3
STANDARD: Final = "STANDARD"
SEGMENT_BYTES: Final = "stratalog.tier.segment.bytes"
LOCK_MODE: Final = "stratalog.tier.lock.mode"
LOCK_MS: Final = "stratalog.tier.lock.ms"
DAY_MS: Final = 24 * HOUR_MS
DIRTY_RATIO: Final = 0.5
OVERSHOOT: Final = 8
"""A segment spans at most this fraction of the retention, so that expiry of whole segments keeps little more than asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """When the cold history is compacted, and how long tombstones stay. ``lag_ms_max`` None: no limit."""

    delete_retention_ms: int = DAY_MS
    lag_ms_min: int = 0
    lag_ms_max: int | None = None
    dirty_ratio_min: float = DIRTY_RATIO
    expiry_header: str = ""
    """Name of the header that says when a record expires; empty: no record does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """Limits of -1 are unlimited. ``local_retention_*`` bound the hot copies of records that are cold as well.

    ``local_retention_ms`` None: the worker's deletion lag after the commit. ``segment_bytes`` None: the worker's target size.
    ``is_copied`` False: nothing more becomes cold; hot records stay until ``retention_*`` removes them. ``zstd_level`` None:
    new segments store blocks as their batches are. ``encryption_key`` names the key that protects the data keys of new
    segments; empty: they are not encrypted. ``storage_class`` is that of new segments; empty: the store's default. New
    segments are locked for ``lock_ms``, unless ``lock_mode`` is None. ``compaction`` is None unless the topic is compacted;
    ``retention_*`` are unlimited unless its records are deleted.
    """

    retention_ms: int = SEVEN_DAYS_MS
    retention_bytes: int = UNLIMITED
    local_retention_ms: int | None = None
    local_retention_bytes: int = UNLIMITED
    segment_ms: int = HOUR_MS
    segment_bytes: int | None = None
    zstd_level: int | None = None
    is_copied: bool = True
    encryption_key: str = ""
    storage_class: str = ""
    lock_mode: LockMode | None = None
    lock_ms: int = 0
    compaction: CompactionPolicy | None = None

    @property
    def segment_span_ms(self) -> int | None:
        """Longest time between the records of a segment made of several ledgers or segments; None: unlimited."""
        return None if self.retention_ms == UNLIMITED else max(self.segment_ms, self.retention_ms // OVERSHOOT)

    def segment_bytes_max(self, default_bytes: int) -> int:
        """Largest size of such a segment; ``default_bytes`` is the worker's target, if the topic has none."""
        wanted_bytes = default_bytes if self.segment_bytes is None else self.segment_bytes
        return wanted_bytes if self.retention_bytes == UNLIMITED else min(wanted_bytes, self.retention_bytes // OVERSHOOT)

    def hot_copy_kept_until_ms(
        self, closed_at_ms: int, cold_since_ms: int, deletion_lag_ms: int, newer_hot_bytes: int
    ) -> int | None:
        """Wall time from which a hot copy may be dropped, ``newer_hot_bytes`` being hot after it; None: never."""
        if self.local_retention_bytes != UNLIMITED and newer_hot_bytes >= self.local_retention_bytes:
            return cold_since_ms
        if self.local_retention_ms is None:
            return cold_since_ms + deletion_lag_ms
        if self.local_retention_ms == UNLIMITED:
            return None
        return max(cold_since_ms, closed_at_ms + self.local_retention_ms)


def tier_policy(configs: Mapping[str, str]) -> TierPolicy:
    """The policy of a topic whose explicitly set, validated configs are ``configs``; missing keys have Kafka's defaults."""
    cleanup = cleanup_policies(configs)
    retention_ms = int(configs.get("retention.ms", SEVEN_DAYS_MS)) if DELETE in cleanup else UNLIMITED
    retention_bytes = int(configs.get("retention.bytes", UNLIMITED)) if DELETE in cleanup else UNLIMITED
    local_bytes = int(configs.get("local.retention.bytes", LIKE_RETENTION))
    return TierPolicy(
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        local_retention_ms=_local_retention_ms(configs, retention_ms),
        local_retention_bytes=retention_bytes if local_bytes == LIKE_RETENTION else local_bytes,
        segment_ms=int(configs.get("segment.ms", HOUR_MS)),
        segment_bytes=int(configs[SEGMENT_BYTES]) if SEGMENT_BYTES in configs else None,
        zstd_level=_zstd_level(configs),
        is_copied=not is_hot_only(configs) and configs.get("remote.log.copy.disable", "false").lower() != "true",
        encryption_key=configs.get("stratalog.tier.encryption.key", ""),
        storage_class=_storage_class(configs),
        lock_mode=_lock_mode(configs),
        lock_ms=int(configs.get(LOCK_MS, 0)),
        compaction=_compaction(configs) if COMPACT in cleanup else None,
    )


def _compaction(configs: Mapping[str, str]) -> CompactionPolicy:
    lag_ms_max = configs.get("max.compaction.lag.ms")
    return CompactionPolicy(
        delete_retention_ms=int(configs.get("delete.retention.ms", DAY_MS)),
        lag_ms_min=int(configs.get("min.compaction.lag.ms", 0)),
        lag_ms_max=None if lag_ms_max is None else int(lag_ms_max),
        dirty_ratio_min=float(configs.get("min.cleanable.dirty.ratio", DIRTY_RATIO)),
        expiry_header=configs.get(EXPIRY_HEADER, ""),
    )


def _storage_class(configs: Mapping[str, str]) -> str:
    """The class to ask for. STANDARD is the default of S3, and all that a store without classes has."""
    given = configs.get("stratalog.tier.storage.class", STANDARD)
    return "" if given == STANDARD else given


def _lock_mode(configs: Mapping[str, str]) -> LockMode | None:
    given = configs.get(LOCK_MODE, "none")
    return None if given == "none" else LockMode(given)


def _zstd_level(configs: Mapping[str, str]) -> int | None:
    if configs.get("stratalog.tier.compression", NONE) != ZSTD:
        return None
    return int(configs.get("stratalog.tier.compression.zstd.level", ZSTD_LEVEL))


def _local_retention_ms(configs: Mapping[str, str], retention_ms: int) -> int | None:
    if "local.retention.ms" not in configs:
        # A limit by size alone would have no effect if time ended at the deletion lag.
        return retention_ms if "local.retention.bytes" in configs else None
    given = int(configs["local.retention.ms"])
    return retention_ms if given == LIKE_RETENTION else given
