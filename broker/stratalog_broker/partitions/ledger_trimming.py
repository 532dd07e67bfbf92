"""Keeps the log of an internal topic short: drops ledgers that are superseded by a newer ledger's checkpoint.

A checkpoint holds the whole state of the partition's application, so a takeover reads nothing before the newest checkpoint
that is complete and durable, and not the state that a restore has left in the object store. Every ledger back to that one is
needed: an owner may die, or lose its writer, after opening a ledger and before all parts of its checkpoint are confirmed,
several times in a row. So the ledgers before a checkpoint are removed from the ``Log`` record when its last part is confirmed,
and never earlier.

The command requires the owner's epoch and the record's version as read. It can be repeated after an unknown outcome: if the
first one took effect, the record has another version and there is nothing left to drop.

A ledger is sealed at 8 MiB, or at the size of its checkpoint if that is larger. An owner replays it, at some 20 MB/s, before it
serves; and checkpoints at most double what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from stratalog_bookies.client import LedgerClient, LedgerWriter
from stratalog_core.errors import Conflict, Fenced, NotLeader, OutcomeUnknown, Retriable, StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import LedgerRef, Log, TopicPartition, ledger_key, log_key
from stratalog_metadata.state.commands import Command, Delete, EpochIs, Put, Update, VersionIs
from stratalog_metadata.topic_rules.topic_configs import RollLimits

_log = logging.getLogger(__name__)
_RETRY_S: Final = 0.5
LEDGER_BYTES: Final = 8 * 1024 * 1024


class LedgerTrimming:
    """Trims the ledgers of one partition for one owner. ``requirement`` guards every command."""

    def __init__(
        self, metadata: MetadataClient, ledgers: LedgerClient, topic_partition: TopicPartition, requirement: EpochIs
    ) -> None:
        self._metadata = metadata
        self._ledgers = ledgers
        self._identity = topic_partition
        self._requirement = requirement
        self._awaited: tuple[int, int] | None = None
        self._checkpoint_bytes = 0
        self._trimming: asyncio.Task[None] | None = None

    def opened(self, writer: LedgerWriter, checkpoint: Sequence[bytes]) -> None:
        """Watch a newly opened ledger, whose first entries are its checkpoint."""
        self._awaited = writer.ledger.ledger_id, len(checkpoint) - 1
        self._checkpoint_bytes = sum(map(len, checkpoint))
        self.confirmed(writer.lac)

    def limit(self, limits: RollLimits) -> RollLimits:
        """Return the limits of the topic, lowered to what keeps the replay of the open ledger short."""
        return replace(limits, segment_bytes=min(limits.segment_bytes, max(LEDGER_BYTES, self._checkpoint_bytes)))

    def confirmed(self, lac: int) -> None:
        """Note that every entry of the open ledger up to ``lac`` has its quorum; trim if that includes the checkpoint."""
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
        if not kept or not (dropped or log.restored_from):
            return
        start_offset = max(log.log_start_offset, kept[0].base_offset)
        trimmed = msgspec.structs.replace(log, ledgers=kept, log_start_offset=start_offset, restored_from="")
        updates: tuple[Update, ...] = (Put(record=trimmed), *(Delete(key=ledger_key(old.ledger_id)) for old in dropped))
        requirements = (self._requirement, VersionIs(key=key, version=versioned.version))
        await self._metadata.propose(Command(updates=updates, requirements=requirements))
        with contextlib.suppress(StratalogError):  # a bookie that misses this deletes the ledgers in its garbage collection
            await self._ledgers.delete([old.ledger_id for old in dropped])

    def stop(self) -> None:
        """Stop trimming; trimming after the next checkpoint includes the remaining ledgers."""
        self._awaited = None
        if self._trimming is not None:
            self._trimming.cancel()


def split_before(log: Log, ledger_id: int) -> tuple[tuple[LedgerRef, ...], tuple[LedgerRef, ...]]:
    """Return the ledgers before ``ledger_id`` and the others; none is before a ledger that ``log`` does not contain."""
    at = next((place for place, ref in enumerate(log.ledgers) if ref.ledger_id == ledger_id), 0)
    return log.ledgers[:at], log.ledgers[at:]
