"""Kafka's rule for the names of topics."""

from __future__ import annotations

import re
from typing import Final

from stratalog_core.errors import Invalid

NAME_CHARACTERS_MAX: Final = 249
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+\Z")


def check_topic_name(name: str) -> None:
    """Raise ``Invalid`` if ``name`` breaks Kafka's rule. Unlike in Kafka, "." and "_" differ."""
    if not name or len(name) > NAME_CHARACTERS_MAX or name in (".", "..") or not _NAME.match(name):
        raise Invalid(
            f"topic name {name[:300]!r}: 1 to {NAME_CHARACTERS_MAX} characters of a-z A-Z 0-9 . _ - and neither '.' nor '..'"
        )
