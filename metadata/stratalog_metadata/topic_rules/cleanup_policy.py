"""The topic config ``cleanup.policy``: whether old records are deleted, and whether those with newer ones of their key are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

COMPACT: Final = "compact"
DELETE: Final = "delete"
CLEANUP_POLICY: Final = "cleanup.policy"


def cleanup_policies(configs: Mapping[str, str]) -> frozenset[str]:
    """The elements of ``cleanup.policy``; without it records are deleted."""
    return frozenset(part.strip() for part in configs.get(CLEANUP_POLICY, DELETE).split(",") if part.strip())
