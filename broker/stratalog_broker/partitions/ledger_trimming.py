"""Drops ledgers of an internal topic that a newer ledger's checkpoint has made superfluous.

A checkpoint holds the whole state of the partition's application, so a takeover reads nothing before the newest checkpoint that
is complete and durable. Every ledger back to that one is needed: an owner may die, or lose its writer, after it has opened
a ledger and before all parts of the checkpoint are confirmed, several times in a row. So the ledgers before a checkpoint
leave the log when its last part is confirmed, and never earlier.

The command requires the owner's epoch and the log as it was read. It may be repeated after an unknown outcome: if the first one
took effect, the log has another version and there is nothing left to drop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

import msgspec

from stratalog_bookies.client import LedgerClient, LedgerWriter
from stratalog_core.errors import Conflict, Fenced, NotLeader, OutcomeUnknown, Retriable, StratalogError
from stratalog_core.ids import TopicPartition
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import LedgerRef, Log, ledger_key, log_key
from stratalog_metadata.state.commands import Command, Delete, EpochIs, Put, Update, VersionIs

_log = logging.getLogger(__name__)
_RETRY_S: Final = 0.5


class LedgerTrimming:
    """For one partition under one owner, whose ``requirement`` guards every command."""

    def __init__(
        self, metadata: MetadataClient, ledgers: LedgerClient, topic_partition: TopicPartition, requirement: EpochIs
    ) -> None:
        self._metadata = metadata
        self._ledgers = ledgers
        self._identity = topic_partition
        self._requirement = requirement
        self._awaited: tuple[int, int] | None = None
        self._trimming: asyncio.Task[None] | None = None

    def opened(self, writer: LedgerWriter, checkpoint_parts: int) -> None:
        """A ledger takes appends; its first ``checkpoint_parts`` entries are its checkpoint."""
        self._awaited = writer.ledger.ledger_id, checkpoint_parts - 1
        self.confirmed(writer.lac)

    def confirmed(self, lac: int) -> None:
        """Every entry of the open ledger up to ``lac`` has its quorum."""
        if self._awaited is None or lac < self._awaited[1]:
            return
        ledger_id, self._awaited = self._awaited[0], None
        if self._trimming is not None:
            self._trimming.cancel()
        self._trimming = asyncio.get_running_loop().create_task(self._trim(ledger_id))

    async def _trim(self, ledger_id: int) -> None:
        while True:
            try:
                await self._trim_once(ledger_id)
                return
            except (NotLeader, Fenced):
                return
            except (Retriable, Conflict, OutcomeUnknown) as again:
                _log.info("dropping ledgers of %s before %d: %s", self._identity, ledger_id, again)
            except StratalogError as failure:
                _log.warning("ledgers of %s before %d are kept: %s", self._identity, ledger_id, failure)
                return
            await asyncio.sleep(_RETRY_S)

    async def _trim_once(self, ledger_id: int) -> None:
        key = log_key(self._identity.topic_id, self._identity.partition)
        versioned = self._metadata.view.get(key)
        if versioned is None or not isinstance(versioned.record, Log):
            raise NotLeader(f"{self._identity} has no log: its topic was deleted")
        log = versioned.record
        dropped, kept = split_before(log, ledger_id)
        if not dropped:
            return
        trimmed = msgspec.structs.replace(log, ledgers=kept, log_start_offset=max(log.log_start_offset, kept[0].base_offset))
        updates: tuple[Update, ...] = (Put(record=trimmed), *(Delete(key=ledger_key(old.ledger_id)) for old in dropped))
        requirements = (self._requirement, VersionIs(key=key, version=versioned.version))
        await self._metadata.propose(Command(updates=updates, requirements=requirements))
        with contextlib.suppress(StratalogError):  # bookies that do not hear of it collect the ledgers later
            await self._ledgers.delete([old.ledger_id for old in dropped])

    def stop(self) -> None:
        """Drop nothing more; the next checkpoint's trimming includes what is left."""
        self._awaited = None
        if self._trimming is not None:
            self._trimming.cancel()


def split_before(log: Log, ledger_id: int) -> tuple[tuple[LedgerRef, ...], tuple[LedgerRef, ...]]:
    """The log's ledgers before ``ledger_id``, and the others; no ledger is before one that the log does not have."""
    at = next((place for place, ref in enumerate(log.ledgers) if ref.ledger_id == ledger_id), 0)
    return log.ledgers[:at], log.ledgers[at:]
