"""Handing partitions to other owners in good order: what the controller asks for, and what a broker that stops asks for itself.

The owner of a partition whose record names a next owner holds what producers send from now on, waits until every batch before
it is confirmed, and seals the ledger and writes the next owner into the record, with one command. So the next owner finds
nothing to recover, and no batch's fate is ever unknown: what was held was never written, and its producers are told who leads
now. Reads are served to the last.

Only some partitions are held at a time, and those that begin together share commands: however many are to be handed over, each
stands still for about as long as one command takes.

A failure leaves the partition with this owner, at the same epoch, until the controller asks again or reassigns it. The held
batches are written then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from stratalog_broker.partitions.batched_semaphore import BatchedSemaphore
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.release import Release
from stratalog_core.errors import StratalogError
from stratalog_core.ids import NO_OWNER
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import GuardedUpdates
from stratalog_metadata.records import Broker, DrainedBroker, Partition, broker_key, drained_broker_key, partition_key
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, Put, SessionAlive, VersionIs

_log = logging.getLogger(__name__)
RELEASE_TIMEOUT_S: Final = 10.0
HELD_AT_ONCE: Final = 64
"""Partitions with producers that are being handed over; the others are served until their turn comes."""
QUIET_AT_ONCE: Final = 256
"""The same, of partitions in which nothing was appended lately."""
HANDED_BYTES_MAX: Final = 512
"""Of an owner's state, in its partition's record: some five producers at work, or twenty that sent one batch."""


class OutgoingHandovers:
    """Hands partitions of this broker over to their next owners, some at a time."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata
        self._view = metadata.view
        self._places, self._quiet_places = BatchedSemaphore(HELD_AT_ONCE), BatchedSemaphore(QUIET_AT_ONCE)
        self._updates = GuardedUpdates(metadata)

    async def hand_over(self, log: PartitionLog) -> None:
        """Give ``log``'s partition to the next owner that its record names, when its turn comes."""
        log.is_leaving = True
        try:
            async with self._places if log.is_busy else self._quiet_places:
                await self._hand_over(log)
        except StratalogError as failure:
            if log.is_serving:
                _log.info("handing over %s: %s", log.topic_partition, failure)
        finally:
            log.is_leaving = False
            log.go_on()

    async def close(self) -> None:
        """Propose no more together; who waits is cancelled."""
        await self._updates.close()

    async def _hand_over(self, log: PartitionLog) -> None:
        """Raises what sealing raises; ``Conflict`` or ``Fenced`` if the controller has changed its mind meanwhile."""
        if self._order_of(log) is None:
            return
        log.hold(partial(self._release_of, log))
        while log.is_serving and log.is_unsealed:
            await log.seal_all()
        # Still ours: nothing was open that it could have been sealed with.
        release = self._release_of(log)
        if release is not None:
            command = Command(updates=release.updates, requirements=release.requirements)
            identity = log.topic_partition
            key = partition_key(identity.topic_id, identity.partition)
            await self._updates.propose(command, key, RELEASE_TIMEOUT_S, share=True)

    def _order_of(self, log: PartitionLog) -> tuple[Partition, int, Broker] | None:
        """The record as the view has it now, its version and the next owner; None if nothing is to be handed over."""
        identity = log.topic_partition
        found = self._view.get(partition_key(identity.topic_id, identity.partition))
        if found is None or not isinstance(found.record, Partition) or not log.is_serving:
            return None
        successor = self._view.find(Broker, broker_key(found.record.next_owner))
        if successor is None or found.record.leader_epoch != log.core.leader_epoch:
            return None
        return found.record, found.version, successor

    def _release_of(self, log: PartitionLog) -> Release | None:
        order = self._order_of(log)
        if order is None:
            return None
        partition, version, successor = order
        handover_checkpoint = log.handover_checkpoint()
        is_small = len(handover_checkpoint) <= HANDED_BYTES_MAX
        handed = msgspec.structs.replace(
            partition,
            owner=successor.broker_id, owner_session=successor.session_id,
            leader_epoch=partition.leader_epoch + 1, next_owner=NO_OWNER, handed=handover_checkpoint if is_small else b"",
        )  # fmt: skip
        requirements = (VersionIs(key=partition.key(), version=version), SessionAlive(session_id=successor.session_id))
        return Release((Put(record=handed),), requirements, b"" if is_small else handover_checkpoint)


async def leave(view: MetadataView, broker_id: int, announce_stop: Callable[[], Awaitable[None]], timeout_s: float) -> None:
    """Ask the controller for other owners, and wait until they have everything, or the time is up.

    Nothing is asked if no other broker could take it.
    """
    owned = Owned(view, broker_id)
    if not others(view, broker_id) or not owned.keys:
        return
    unsubscribe = view.subscribe(owned.follow)
    try:
        async with asyncio.timeout(timeout_s):
            await announce_stop()
            while owned.keys and others(view, broker_id):
                owned.changed.clear()
                await owned.changed.wait()
    except TimeoutError:
        _log.warning("broker %d stops before all of its partitions were handed over", broker_id)
    except StratalogError as failure:
        _log.warning("broker %d could not hand over its partitions: %s", broker_id, failure)
    finally:
        unsubscribe()


def others(view: MetadataView, broker_id: int) -> bool:
    """Whether another live broker takes partitions."""
    return any(takes_partitions(view, broker) for broker in view.all(Broker) if broker.broker_id != broker_id)


def takes_partitions(view: MetadataView, broker: Broker) -> bool:
    return not broker.stopping and view.find(DrainedBroker, drained_broker_key(broker.broker_id)) is None


class Owned:
    """Keys of the partitions that a broker owns, looked for once and then followed, change by change."""

    def __init__(self, view: MetadataView, broker_id: int) -> None:
        self._broker_id = broker_id
        self.keys = {partition.key() for partition in view.all(Partition) if partition.owner == broker_id}
        self.changed = asyncio.Event()

    def follow(self, changes: Sequence[Change]) -> None:
        """What the view has changed."""
        for change in changes:
            record = change.after.record if change.after is not None else None
            if isinstance(record, Partition) and record.owner == self._broker_id:
                self.keys.add(change.key)
            else:
                self.keys.discard(change.key)
        self.changed.set()
