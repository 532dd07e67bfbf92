"""Checks updates of features. Levels belong to the software, so the only valid update is one to the level in force."""

from __future__ import annotations

from enum import IntEnum

from stratalog_broker.admin.errors import InvalidFeatureLevel
from stratalog_broker.configs.features import level_of


class UpgradeType(IntEnum):
    """Numbers are UpdateFeatures' ``upgrade_type`` (KIP-584)."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


def check_feature_update(name: str, level: int, upgrade_type: int) -> None:
    """Raise ``InvalidFeatureLevel`` unless the feature exists and is at ``level`` already."""
    if upgrade_type not in set(UpgradeType):
        raise InvalidFeatureLevel(f"upgrade type is {upgrade_type}; choose 1 (upgrade), 2 or 3 (safe or unsafe downgrade)")
    present = level_of(name)
    if level != present or not present:
        known = f"this version of Stratalog only supports level {present}" if present else "this feature is not supported"
        raise InvalidFeatureLevel(f"invalid update version {level} for feature {name[:60]}: {known}")
