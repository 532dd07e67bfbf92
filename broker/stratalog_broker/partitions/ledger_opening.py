"""Opening a partition's next ledger: one command creates the ledger and adds it to the partition ledgers (``Log`` record).

The command requires this owner's epoch and the ``Log`` record's version as read, so that two owners, or two attempts of one
owner, never both extend it. An attempt with unknown outcome may leave an empty ledger in the record; it is sealed before the
next one is opened. Opening a ledger removes none: ``ledger_trimming.py`` does that for internal topics.

A broker that loses a partition's writer takes the partition over again in the same epoch, so the epoch does not tell the
resigned owner from its successor. ``stop`` ends the attempts of the resigned one: it would seal the successor's open ledger as
a leftover and open the next at an offset that the successor has already assigned. As a second defence, no ledger is opened
below the end of the log. The view shows that end at the record's version that the command requires, and the end of a sealed
ledger is final, so the state machine does not have to check it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from stratalog_bookies.client import LedgerClient, LedgerListener, LedgerSpec, LedgerWriter
from stratalog_core.errors import Conflict, NotLeader, Overloaded, Retriable
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Topic,
    TopicPartition,
    ledger_key,
    log_key,
    manifest_pointer_key,
)
from stratalog_metadata.state.commands import EpochIs, Put, Update, VersionIs
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs

_log = logging.getLogger(__name__)
_RETRY_S: Final = 0.1
_ROOM_RETRY_S: Final = 0.02


class LedgerOpening:
    """Opens the ledgers of one partition for one owner. ``requirement`` guards every command."""

    def __init__(
        self, view: MetadataView, ledgers: LedgerClient, topic_partition: TopicPartition, requirement: EpochIs
    ) -> None:
        self._view = view
        self._ledgers = ledgers
        self._identity = topic_partition
        self._requirement = requirement
        self._is_stopped = False

    def stop(self) -> None:
        """Begin no further attempt, because the owner has resigned. A command that was already sent may take effect."""
        self._is_stopped = True

    async def open(self, topic: Topic, base_offset: int, listener: LedgerListener, checkpoint: Sequence[bytes]) -> LedgerWriter:
        """Return a writer for a new ledger at ``base_offset``, after appending the parts of its checkpoint.

        Retries attempts that had no effect. Raises ``StaleEpoch`` or ``NotLeader`` (the owner has changed or resigned, or the
        log ends above ``base_offset``), ``OutcomeUnknown``, ``Corrupt``.
        """
        writer = await self._open(topic, base_offset, listener)
        try:
            for number, part in enumerate(checkpoint):
                if number:
                    await asyncio.sleep(0)  # checksums of a large checkpoint must not block the event loop
                await _append(writer, part)
        except BaseException:
            writer.abandon()
            raise
        return writer

    async def _open(self, topic: Topic, base_offset: int, listener: LedgerListener) -> LedgerWriter:
        while not self._is_stopped:
            try:
                return await self._open_once(topic, base_offset, listener)
            except NotLeader:
                raise
            except (Retriable, Conflict) as again:
                _log.info("opening a ledger of %s: %s", self._identity, again)
            await asyncio.sleep(_RETRY_S)
        raise NotLeader(f"this owner of {self._identity} has resigned; it opens no more ledgers")

    async def _open_once(self, topic: Topic, base_offset: int, listener: LedgerListener) -> LedgerWriter:
        key = log_key(self._identity.topic_id, self._identity.partition)
        versioned = self._view.get(key)
        if versioned is None or not isinstance(versioned.record, Log):
            raise NotLeader(f"{self._identity} has no log: its topic was deleted")
        log = versioned.record
        sealed = await self._seal_leftovers(log)
        self._require_end(log, sealed, base_offset)

        def updates(ledger: Ledger) -> tuple[Update, ...]:
            ref = LedgerRef(ledger_id=ledger.ledger_id, base_offset=base_offset, leader_epoch=self._requirement.leader_epoch)
            return (Put(record=msgspec.structs.replace(log, ledgers=(*log.ledgers, ref))),)

        requirements = (self._requirement, VersionIs(key=key, version=versioned.version))
        return await self._ledgers.create(
            self._spec(topic, base_offset), requirements=requirements, updates=updates, listener=listener
        )

    def _spec(self, topic: Topic, base_offset: int) -> LedgerSpec:
        copies = topic.replication_factor
        return LedgerSpec(
            topic_id=self._identity.topic_id,
            partition=self._identity.partition,
            base_offset=base_offset,
            leader_epoch=self._requirement.leader_epoch,
            ensemble_size=copies,
            write_quorum=copies,
            ack_quorum=TopicConfigs.in_force(topic, self._view).ack_quorum,
        )

    async def _seal_leftovers(self, log: Log) -> Sequence[Ledger]:
        """Seal ledgers left open by an attempt with unknown outcome; a ledger that was written to is already sealed.

        Return the sealed records: the view may lack one that another recovery closed.
        """
        records = (self._view.find(Ledger, ledger_key(ref.ledger_id)) for ref in log.ledgers)
        leftovers = [record.ledger_id for record in records if record is not None and record.state is not LedgerState.CLOSED]
        return await self._ledgers.recover(leftovers, requirements=(self._requirement,)) if leftovers else ()

    def _require_end(self, log: Log, sealed: Sequence[Ledger], base_offset: int) -> None:
        """Raise ``NotLeader`` if the log ends above ``base_offset``: the new ledger would assign its last offsets again."""
        end_offset = self._end_of(log, sealed)
        if base_offset < end_offset:
            raise NotLeader(
                f"the log of {self._identity} ends at offset {end_offset}; a ledger at {base_offset} would assign offsets"
                " twice: the partition is taken over again"
            )

    def _end_of(self, log: Log, sealed: Sequence[Ledger]) -> int:
        """Return the end of the last ledger, or that of the cold history if ``log`` has no ledgers; 0 if it is empty."""
        if not log.ledgers:
            pointer = self._view.find(ManifestPointer, manifest_pointer_key(self._identity.topic_id, self._identity.partition))
            return pointer.end_offset if pointer is not None else 0
        last_id = log.ledgers[-1].ledger_id
        last = next((each for each in sealed if each.ledger_id == last_id), self._view.find(Ledger, ledger_key(last_id)))
        return last.end_offset if last is not None else log.ledgers[-1].base_offset


async def _append(writer: LedgerWriter, entry: bytes) -> None:
    """Append ``entry`` once the ledger client has room: a large checkpoint can exceed what it holds at a time."""
    while True:
        try:
            writer.append(entry)
            return
        except Overloaded:
            await asyncio.sleep(_ROOM_RETRY_S)
