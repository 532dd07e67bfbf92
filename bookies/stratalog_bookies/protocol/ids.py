"""Bounds of the ledger and entry ids in messages and files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from stratalog_core.errors import Invalid

ID_MAX: Final = 2**63 - 1
"""Greatest ledger and entry id. Ids are also sent and stored as signed numbers, in which -1 means "none"."""

LedgerId = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
EntryId = Annotated[int, msgspec.Meta(ge=-1, le=ID_MAX)]
"""-1: none."""


def check_ids(ored_ids: Sequence[int], what: str) -> None:
    """Raise ``Invalid`` for an id above the maximum. The bitwise or of unsigned ids exceeds it exactly if one of them does."""
    if max(ored_ids, default=0) > ID_MAX:
        raise Invalid(f"{what} has a ledger or entry id above {ID_MAX}, the maximum")
