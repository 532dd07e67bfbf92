"""Planted faults of commands that edit history, or delete objects, beside running workers, run in ``commands``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from stratalog_core.errors import StratalogError
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.copies import hot_repair
from stratalog_tiering.maintenance import erasure, orphans
from stratalog_tiering.offload import commit, offloading
from stratalog_tiering.worker import collection, partition_work


class _NoLease:
    def check(self) -> None:
        """Find nothing wrong."""


@asynccontextmanager
async def _unprotected(*arguments: Any) -> AsyncIterator[_NoLease]:
    yield _NoLease()


async def _let_succeed(metadata: Any, pointer: Any, due: Any) -> None:
    """Replaces ``refuse_earlier_commits``."""


def sweeps_let_earlier_commits_succeed() -> None:
    """An earlier behaviour: a command that is stopped after the last look at its lease commits what was swept meanwhile."""
    orphans.refuse_earlier_commits = _let_succeed
    collection.refuse_earlier_commits = _let_succeed  # type: ignore[attr-defined]


def commands_hold_no_lease() -> None:
    """An earlier behaviour: what a command has written is an orphan until its commit, and nothing keeps or protects it."""
    sweeps_let_earlier_commits_succeed()
    erasure.unswept = _unprotected  # type: ignore[attr-defined, assignment]
    hot_repair.unswept = _unprotected  # type: ignore[attr-defined, assignment]


async def _nothing(self: ManifestSource, footer: Any) -> None:
    """Replaces ``check_data_key``."""


def hot_copies_go_without_a_look_at_data_keys() -> None:
    """An earlier behaviour: a hot copy is dropped although nobody can decrypt its cold copy."""
    ManifestSource.check_data_key = _nothing  # type: ignore[method-assign]


def hot_copies_go_although_damage_is_known() -> None:
    """An earlier behaviour: a hot copy is dropped while the scrub repairs the cold one from it."""
    offloading._known_damage = lambda ports, pointer: ((), ())


def damaged_parts_stop_offloads() -> None:
    """An earlier behaviour: nothing is committed while a page or list that would be merged is damaged."""

    async def all_or_nothing(refs: Any, load: Any) -> dict[str, Any]:
        return {ref.key: await load(ref) for ref in refs}

    commit.readable = all_or_nothing


class _Never(StratalogError):
    """Raised by nothing."""


def damaged_lists_stop_retention() -> None:
    """An earlier behaviour: nothing expires while the list of what is to be deleted next is damaged."""
    partition_work.Corrupt = _Never  # type: ignore[attr-defined, assignment]


IN_COMMANDS: Final = (
    damaged_parts_stop_offloads,
    damaged_lists_stop_retention,
    hot_copies_go_without_a_look_at_data_keys,
    hot_copies_go_although_damage_is_known,
    commands_hold_no_lease,
    sweeps_let_earlier_commits_succeed,
)
