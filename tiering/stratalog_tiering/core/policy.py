"""The tiering policy in a topic's configuration, under Kafka's names. Other keys are ignored. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_tiering.format.footer import NONE, ZSTD

SEVEN_DAYS_MS: Final = 7 * 24 * 3_600_000
UNLIMITED: Final = -1
LIKE_TIERING: Final = -2
HOUR_MS: Final = 3_600_000
ZSTD_LEVEL: Final = 3
OVERSHOOT: Final = 8
"""A segment spans at most this fraction of the retention, so that expiry of whole segments keeps little more than asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """``retention_*`` -1: unlimited. ``local_retention_ms`` -2: drop hot copies after the deletion lag; -1: keep them.

    ``zstd_level`` None: new segments store blocks as their batches are.
    """

    retention_ms: int = SEVEN_DAYS_MS
    retention_bytes: int = UNLIMITED
    local_retention_ms: int = LIKE_TIERING
    segment_ms: int = HOUR_MS
    zstd_level: int | None = None

    @property
    def segment_span_ms(self) -> int | None:
        """Longest time between the records of a segment made of several ledgers or segments; None: unlimited."""
        return None if self.retention_ms == UNLIMITED else max(self.segment_ms, self.retention_ms // OVERSHOOT)

    def segment_bytes_max(self, wanted_bytes: int) -> int:
        """Largest size of such a segment; ``wanted_bytes`` is the worker's target."""
        return wanted_bytes if self.retention_bytes == UNLIMITED else min(wanted_bytes, self.retention_bytes // OVERSHOOT)

    def hot_copy_kept_until_ms(self, closed_at_ms: int, cold_since_ms: int, deletion_lag_ms: int) -> int | None:
        """Wall time from which a hot copy may be dropped; None: never."""
        if self.local_retention_ms == UNLIMITED:
            return None
        kept_ms = max(0, self.local_retention_ms)
        return max(cold_since_ms + deletion_lag_ms, closed_at_ms + kept_ms)


def tier_policy(configs: Mapping[str, str]) -> TierPolicy:
    """The policy of a topic whose explicitly set, validated configs are ``configs``; missing keys have Kafka's defaults."""
    return TierPolicy(
        retention_ms=int(configs.get("retention.ms", SEVEN_DAYS_MS)),
        retention_bytes=int(configs.get("retention.bytes", UNLIMITED)),
        local_retention_ms=int(configs.get("local.retention.ms", LIKE_TIERING)),
        segment_ms=int(configs.get("segment.ms", HOUR_MS)),
        zstd_level=_zstd_level(configs),
    )


def _zstd_level(configs: Mapping[str, str]) -> int | None:
    if configs.get("stratalog.tier.compression", NONE) != ZSTD:
        return None
    return int(configs.get("stratalog.tier.compression.zstd.level", ZSTD_LEVEL))
