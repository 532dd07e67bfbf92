"""The updates that an owner writes together with the seal of a partition's last ledger, to hand the partition over."""

from __future__ import annotations

from typing import NamedTuple

from stratalog_metadata.state.commands import Requirement, Update


class Release(NamedTuple):
    """The updates that hand a partition over, and their requirements."""

    updates: tuple[Update, ...]
    requirements: tuple[Requirement, ...]
    last_entry: bytes
    """Appended after the ledger's last batch; empty if there is none."""
