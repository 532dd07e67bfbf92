"""Updates of the finalized levels of features, with Kafka's checks (``FeatureControlManager``): all of a request, or none.

The levels are one metadata record. Every broker of this software supports every level, so no broker is asked for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from stratalog_broker.admin.errors import InvalidFeatureLevel
from stratalog_broker.configs.features import finalized_features, find_feature
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.records import FEATURES, FEATURES_KEY, DynamicConfig
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs


class UpgradeType(IntEnum):
    """Numbers are UpdateFeatures' ``upgrade_type`` (KIP-584)."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureUpdate:
    """One row of a request. ``upgrade_type`` may be none of ``UpgradeType``."""

    name: str
    level: int
    upgrade_type: int


async def update_features(
    metadata: MetadataClient, updates: Sequence[FeatureUpdate], timeout_s: float, *, validate_only: bool
) -> None:
    """Set the finalized levels. Raises ``InvalidFeatureLevel``, in which case nothing is changed."""

    async def attempt() -> None:
        await metadata.refresh(timeout_s)
        stored = metadata.view.get(FEATURES_KEY)
        before = finalized_features(metadata.view).levels
        for update in updates:
            _check(update, before)
        after = {**before, **{update.name: update.level for update in updates}}
        if validate_only or after == before:
            return
        record = DynamicConfig(resource=FEATURES, configs={name: str(level) for name, level in after.items()})
        requirement = VersionIs(key=FEATURES_KEY, version=ABSENT if stored is None else stored.version)
        command = Command(updates=(Put(record=record),), requirements=(requirement,))
        await propose_guarded(metadata, command, FEATURES_KEY, timeout_s)

    await decide_again("the cluster's features", attempt)


def _check(update: FeatureUpdate, levels: Mapping[str, int]) -> None:
    reason = _why_invalid(update, levels.get(update.name, 0))
    if reason is not None:
        raise InvalidFeatureLevel(f"invalid update version {update.level} for feature {update.name[:60]}: {reason}")


def _why_invalid(update: FeatureUpdate, present: int) -> str | None:
    if update.upgrade_type not in set(UpgradeType):
        return f"upgrade type is {update.upgrade_type}; choose 1 (upgrade), 2 or 3 (safe or unsafe downgrade)"
    if update.level < 0:
        return "a level cannot be less than 0"
    feature = find_feature(update.name)
    if feature is None:
        return "this feature is not supported"
    if update.level > feature.max_level:
        return f"this version of Stratalog only supports levels 0-{feature.max_level}"
    if update.level < present and update.upgrade_type == UpgradeType.UPGRADE:
        return "a lower level needs the upgrade type safe or unsafe downgrade"
    if update.level > present and update.upgrade_type != UpgradeType.UPGRADE:
        return f"a downgrade cannot raise the level, which is {present}"
    return None
