"""Ledger and entry ids as messages and files carry them, and where they end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from stratalog_core.errors import Invalid

ID_MAX: Final = 2**63 - 1
"""Greatest ledger and entry id: both also travel and are stored as signed numbers, whose -1 says that there is none."""

LedgerId = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
EntryId = Annotated[int, msgspec.Meta(ge=-1, le=ID_MAX)]
"""-1: none."""


def check_ids(ored_ids: Sequence[int], what: str) -> None:
    """Raise ``Invalid`` for an id beyond the greatest. Unsigned ids that were or'ed together exceed it exactly if one does."""
    if max(ored_ids, default=0) > ID_MAX:
        raise Invalid(f"{what} has a ledger or entry id beyond {ID_MAX}")
