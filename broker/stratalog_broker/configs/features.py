"""Kafka's features (KIP-584) that this cluster has: the one list from which ApiVersions and UpdateFeatures answer.

The finalized level of a feature is one level of the whole cluster. ``admin/feature_updates.py`` changes it; a level that was
never changed is the highest that the software supports, as in a newly formatted Kafka cluster. Clients choose protocols by the
finalized levels. A feature that is not listed is at level 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import FEATURES_KEY, DynamicConfig

TRANSACTION_VERSION: Final = "transaction.version"
"""Level 2: every transaction has a producer epoch of its own, and a batch adds its partition to its transaction (KIP-890)."""
GROUP_VERSION: Final = "group.version"
"""Level 1: the consumer protocol of groups (KIP-848)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature under Kafka's name, supported from level 0, which disables it, to ``max_level``."""

    name: str
    max_level: int


FEATURES: Final[tuple[Feature, ...]] = (
    Feature(name=TRANSACTION_VERSION, max_level=2),
    Feature(name=GROUP_VERSION, max_level=1),
)
"""Add a feature together with the APIs that it promises: clients change their protocol when they see it."""


def find_feature(name: str) -> Feature | None:
    """Return the feature with the name, if the cluster has it."""
    return next((feature for feature in FEATURES if feature.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizedFeatures:
    """The levels in force, by name. ``epoch`` rises with every change."""

    epoch: int
    levels: Mapping[str, int]

    def level_of(self, name: str) -> int:
        """Return the level of a feature; 0 if it is disabled or the cluster does not have it."""
        return self.levels.get(name, 0)


def finalized_features(view: MetadataView) -> FinalizedFeatures:
    """Return the finalized levels of all features of the cluster."""
    stored = view.get(FEATURES_KEY)
    changed = stored.record.configs if stored is not None and isinstance(stored.record, DynamicConfig) else {}
    return FinalizedFeatures(
        epoch=0 if stored is None else stored.version,
        levels={one.name: min(int(changed.get(one.name, one.max_level)), one.max_level) for one in FEATURES},
    )
