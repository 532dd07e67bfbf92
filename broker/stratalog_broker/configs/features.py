"""Kafka's features (KIP-584) that this cluster has: the one list from which ApiVersions and UpdateFeatures answer.

A feature's level belongs to the software, not to the cluster's state: every broker serves the same levels, so the supported
range is that one level, it is always finalized, and nothing can be upgraded or downgraded. A feature that is not listed is at
level 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature under Kafka's name. ``level`` is the lowest and highest supported level, and the finalized one."""

    name: str
    level: int


FEATURES: Final[tuple[Feature, ...]] = ()
"""Add a feature together with the APIs that it promises: clients change their protocol when they see it."""
EPOCH: Final = 0
"""Epoch of the finalized features. It is constant because the levels are."""


def level_of(name: str) -> int:
    """Return the level of a feature; 0 if the cluster does not have it."""
    return next((feature.level for feature in FEATURES if feature.name == name), 0)
