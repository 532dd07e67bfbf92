"""Opening a partition's next ledger: one command that makes the ledger and enters it in the partition's log.

The command requires that the partition is still this owner's and that the log is as it was read, so that two owners, or two
attempts of one, never both extend it. An attempt of unknown outcome may leave an empty ledger in the log: it is
sealed before the next one is opened. Internal topics drop their older ledgers in the same command, because
each ledger's checkpoint holds the whole state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from stratalog_bookies.client import LedgerListener, LedgerSpec, LedgerWriter
from stratalog_broker.topic_configs import TopicConfigs
from stratalog_core.errors import Conflict, NotLeader, Retriable, StratalogError
from stratalog_core.ids import TopicPartition
from stratalog_metadata.commands import Delete, EpochIs, Put, Update, VersionIs
from stratalog_metadata.records import Ledger, LedgerRef, LedgerState, Log, Topic, ledger_key, log_key

if TYPE_CHECKING:
    from stratalog_broker.context import BrokerServices

_log = logging.getLogger(__name__)
_RETRY_S: Final = 0.1
KEPT_OF_INTERNAL_TOPIC: Final = 1
"""Sealed ledgers that an internal topic keeps beside the new one, whose checkpoint is not durable yet when it is opened."""


class LedgerOpening:
    """For one partition under one owner, whose ``requirement`` guards every command."""

    def __init__(self, services: BrokerServices, topic_partition: TopicPartition, requirement: EpochIs) -> None:
        self._services = services
        self._identity = topic_partition
        self._requirement = requirement
        self._dropping: asyncio.Task[None] | None = None
        self.log_start_offset = 0
        """First offset of the log after the last ledger was opened; moves when ledgers of an internal topic are dropped."""

    async def open(self, topic: Topic, base_offset: int, listener: LedgerListener, *, keep_all: bool) -> LedgerWriter:
        """A writer for a new ledger at ``base_offset``; tries again while nothing has happened.

        Raises ``StaleEpoch`` or ``NotLeader`` (no longer ours), ``OutcomeUnknown``, ``Corrupt``.
        """
        while True:
            try:
                return await self._open_once(topic, base_offset, listener, keep_all)
            except NotLeader:
                raise
            except (Retriable, Conflict) as again:
                _log.info("opening a ledger of %s: %s", self._identity, again)
            await asyncio.sleep(_RETRY_S)

    async def _open_once(self, topic: Topic, base_offset: int, listener: LedgerListener, keep_all: bool) -> LedgerWriter:
        key = log_key(self._identity.topic_id, self._identity.partition)
        versioned = self._services.view.get(key)
        if versioned is None or not isinstance(versioned.record, Log):
            raise NotLeader(f"{self._identity} has no log: its topic was deleted")
        await self._seal_leftovers(versioned.record)
        log, dropped = (versioned.record, ()) if keep_all else _without_old_ledgers(versioned.record)

        def updates(ledger: Ledger) -> tuple[Update, ...]:
            ref = LedgerRef(ledger_id=ledger.ledger_id, base_offset=base_offset, leader_epoch=self._requirement.leader_epoch)
            put = Put(record=_with_ledgers(log, (*log.ledgers, ref), log.log_start_offset))
            return (put, *(Delete(key=ledger_key(old.ledger_id)) for old in dropped))

        requirements = (self._requirement, VersionIs(key=key, version=versioned.version))
        writer = await self._services.ledgers.create(
            self._spec(topic, base_offset), requirements=requirements, updates=updates, listener=listener
        )
        self.log_start_offset = log.log_start_offset
        if dropped:
            self._dropping = asyncio.get_running_loop().create_task(self._delete([old.ledger_id for old in dropped]))
        return writer

    def _spec(self, topic: Topic, base_offset: int) -> LedgerSpec:
        copies = topic.replication_factor
        return LedgerSpec(
            topic_id=self._identity.topic_id,
            partition=self._identity.partition,
            base_offset=base_offset,
            leader_epoch=self._requirement.leader_epoch,
            ensemble_size=copies,
            write_quorum=copies,
            ack_quorum=min(TopicConfigs.of(topic).min_insync_replicas, copies),
        )

    async def _seal_leftovers(self, log: Log) -> None:
        """Seal what an attempt of unknown outcome left open; what was really written to is sealed by now."""
        records = (self._services.view.find(Ledger, ledger_key(ref.ledger_id)) for ref in log.ledgers)
        leftovers = [record.ledger_id for record in records if record is not None and record.state is not LedgerState.CLOSED]
        if leftovers:
            await self._services.ledgers.recover(leftovers, requirements=(self._requirement,))

    async def _delete(self, ledger_ids: list[int]) -> None:
        """Tell the bookies; if that fails, their own collection finds out."""
        with contextlib.suppress(StratalogError):
            await self._services.ledgers.delete(ledger_ids)

    async def close(self) -> None:
        """Stop telling bookies."""
        if self._dropping is not None:
            self._dropping.cancel()
            await asyncio.gather(self._dropping, return_exceptions=True)


def _without_old_ledgers(log: Log) -> tuple[Log, tuple[LedgerRef, ...]]:
    """The log with only the newest ledgers, and those that it loses."""
    dropped, kept = log.ledgers[:-KEPT_OF_INTERNAL_TOPIC], log.ledgers[-KEPT_OF_INTERNAL_TOPIC:]
    if not dropped:
        return log, ()
    return _with_ledgers(log, kept, max(log.log_start_offset, kept[0].base_offset)), dropped


def _with_ledgers(log: Log, ledgers: tuple[LedgerRef, ...], log_start_offset: int) -> Log:
    return Log(topic_id=log.topic_id, index=log.index, ledgers=ledgers, log_start_offset=log_start_offset)
