"""What a topic's configuration asks of tiering, under Kafka's names. Other names are other components' business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SEVEN_DAYS_MS: Final = 7 * 24 * 3_600_000
UNLIMITED: Final = -1
LIKE_TIERING: Final = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """``retention_*``: -1 is for ever. ``local_retention_ms``: -2 lets hot copies go after the deletion lag, -1 never."""

    retention_ms: int = SEVEN_DAYS_MS
    retention_bytes: int = UNLIMITED
    local_retention_ms: int = LIKE_TIERING

    def hot_copy_kept_until_ms(self, closed_at_ms: int, cold_since_ms: int, deletion_lag_ms: int) -> int | None:
        """When a hot copy may go (wall time); None: never."""
        if self.local_retention_ms == UNLIMITED:
            return None
        kept_ms = max(0, self.local_retention_ms)
        return max(cold_since_ms + deletion_lag_ms, closed_at_ms + kept_ms)


def tier_policy(configs: Mapping[str, str]) -> TierPolicy:
    """From ``Topic.configs``, which brokers have validated; what is not set has Kafka's default."""
    return TierPolicy(
        retention_ms=int(configs.get("retention.ms", SEVEN_DAYS_MS)),
        retention_bytes=int(configs.get("retention.bytes", UNLIMITED)),
        local_retention_ms=int(configs.get("local.retention.ms", LIKE_TIERING)),
    )
