"""Planted faults in what follows a restore of metadata from an old copy, run in ``old-metadata``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stratalog.tier import lost_coordinators
from stratalog_bookies.client import LedgerClient
from stratalog_bookies.client.ledger_recovery import LedgerRecoveries
from stratalog_bookies.node.collector import Collector
from stratalog_bookies.protocol.messages import LedgerTail
from stratalog_broker.partitions.takeover import Takeover
from stratalog_metadata.storage import restored_copy


def restored_epochs_are_those_of_the_copy() -> None:
    """Owners write under leader epochs that owners of the lost history had."""
    restored_copy._raised_epochs = lambda records, index: iter(())


def ledgers_of_the_copys_blocks_are_deleted() -> None:
    """Of the lost ledgers only those are kept whose ids the copy had not allocated."""
    restored_copy._known_ledgers = lambda records, index: iter(())


def ledgers_that_the_copy_knew_are_kept() -> None:
    """Bookies keep every ledger that may have been lost, also after its record was removed."""

    async def lost(self: Collector, ledger_ids: set[int], first: int) -> set[int]:
        return {ledger_id for ledger_id in ledger_ids if ledger_id < first}

    Collector._lost = lost  # type: ignore[assignment, method-assign]


def all_ledgers_that_the_copy_allocated_are_deleted() -> None:
    """Bookies take every ledger without a record for one that was deleted."""

    async def lost(self: Collector, ledger_ids: set[int], first: int) -> set[int]:
        return set()

    Collector._lost = lost  # type: ignore[assignment, method-assign]


def bookies_that_the_copy_does_not_name_are_not_asked() -> None:
    """A recovery reads only the bookies of the record, although its writer had changed them since."""

    async def strays(self: LedgerRecoveries, ledger: Any) -> list[str]:
        return []

    LedgerRecoveries._strays = strays  # type: ignore[method-assign]


def partitions_wait_for_deleted_ledgers() -> None:
    """A takeover fails if bookies have deleted a ledger that metadata names."""
    read = LedgerClient.recover_reading

    async def recover_reading(self: LedgerClient, *asked: Any, may_be_deleted: bool = False, **named: Any) -> Any:
        return await read(self, *asked, **named)

    LedgerClient.recover_reading = recover_reading  # type: ignore[method-assign]


def owners_take_what_is_left_of_deleted_ledgers() -> None:
    """An owner of an internal topic's partition takes the state in a sealed ledger that other bookies have deleted."""

    async def refuse_deleted(self: Takeover, ledgers: Any) -> None:
        pass

    Takeover._refuse_deleted = refuse_deleted  # type: ignore[method-assign]


def only_coordinators_without_any_entry_are_lost() -> None:
    """A partition of an internal topic stays without an owner if one bookie still has what others have deleted."""
    silent = lost_coordinators._silent

    async def silent_unless_held(view: Any, client: Any, *others: Any) -> Any:
        class Client:
            async def tails(self, ledger: Any) -> dict[str, Any]:
                found = await client.tails(ledger)
                return {name: _without_deletion(tail) for name, tail in found.items()}

        return await silent(view, Client(), *others)  # type: ignore[arg-type]

    lost_coordinators._silent = silent_unless_held  # type: ignore[assignment]


def _without_deletion(tail: Any) -> Any:
    return msgspec.structs.replace(tail, deleted=False) if isinstance(tail, LedgerTail) else tail


IN_OLD_METADATA: Sequence[Any] = (
    restored_epochs_are_those_of_the_copy,
    ledgers_of_the_copys_blocks_are_deleted,
    ledgers_that_the_copy_knew_are_kept,
    all_ledgers_that_the_copy_allocated_are_deleted,
    bookies_that_the_copy_does_not_name_are_not_asked,
    partitions_wait_for_deleted_ledgers,
    owners_take_what_is_left_of_deleted_ledgers,
    only_coordinators_without_any_entry_are_lost,
)
