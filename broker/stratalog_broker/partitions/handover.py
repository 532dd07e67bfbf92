"""Handover of partitions to other owners, requested by the controller or by a broker in controlled shutdown.

When a partition's record names a next owner, the current owner queues new batches, waits until all earlier batches are
confirmed, then seals the ledger and writes the next owner into the record in one command. The next owner has nothing to
recover, and no batch has an unknown outcome: queued batches were never written, and their producers are redirected to the new
leader. Reads are served until that command is sent, and wait for its outcome from then on: the next owner may acknowledge
records before this one hears of it.

Only a limited number of partitions is held at a time, and those that begin together share commands: each partition pauses for
about the duration of one command, however many are handed over.

A failure leaves the partition with its current owner, at the same epoch, until the controller asks again or reassigns it. The
owner then writes the queued batches itself.
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
from stratalog_core.errors import OutcomeUnknown, StratalogError
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import RETRY_S, SharedGuardedUpdates
from stratalog_metadata.records import NO_OWNER, Broker, DrainedBroker, Log, Partition, broker_key, drained_broker_key, log_key
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, Put, SessionAlive, VersionIs

_log = logging.getLogger(__name__)
RELEASE_TIMEOUT_S: Final = 10.0
HELD_AT_ONCE: Final = 64
"""Maximum of busy partitions handed over at a time; the others are served until it is their turn."""
QUIET_AT_ONCE: Final = 256
"""Maximum of partitions without recent appends that are handed over at a time."""
HANDED_BYTES_MAX: Final = 512
"""Largest handover checkpoint stored in the partition's record: some five active producers, or twenty with one batch each."""
HANDED_WITHOUT_LEDGERS_BYTES_MAX: Final = 4096
"""The same for a partition without ledgers, whose state the next owner would else have to read from the object store."""


class OutgoingHandovers:
    """Hands partitions of this broker over to their next owners, a limited number at a time."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata
        self._view = metadata.view
        self._places, self._quiet_places = BatchedSemaphore(HELD_AT_ONCE), BatchedSemaphore(QUIET_AT_ONCE)
        self._updates = SharedGuardedUpdates(metadata)
        self._latest: dict[PartitionLog, object] = {}
        """The last handover that has held each partition, until that has ended."""

    async def hand_over(self, log: PartitionLog) -> None:
        """Wait for a slot, then hand ``log``'s partition over to the next owner named in its record.

        An order that comes meanwhile starts no handover of its own. So if this one fails, it is followed by the next.
        """
        log.is_leaving, this, order = True, object(), self._order_of(log)
        try:
            async with self._places if log.is_busy else self._quiet_places:
                await self._hand_over(log, this)
        except StratalogError as failure:
            if log.is_serving:
                _log.info("handing over %s: %s", log.topic_partition, failure)
        finally:
            log.is_leaving = False
            log.go_on()
        await self._serve_readers_again(log, this)
        if self._latest.get(log) is this:
            del self._latest[log]
        latest = self._order_of(log)
        if latest is not None and latest != order and not log.is_leaving:
            await self.hand_over(log)

    async def _serve_readers_again(self, log: PartitionLog, this: object) -> None:
        """Wait until the view shows the outcome of the handover; if the partition is still owned here, answer its readers.

        If the next handover has begun meanwhile, its command may be under way: that handover answers the readers.
        """
        while log.is_serving and log.is_releasing and self._latest.get(log) is this:
            try:
                await self._metadata.refresh()
            except StratalogError as failure:
                _log.debug("the owner of %s is not known: %s", log.topic_partition, failure)
                await asyncio.sleep(RETRY_S)
                continue
            if self._latest.get(log) is this:
                log.is_releasing = False
                log.notify()

    async def close(self) -> None:
        """Stop proposing shared commands and cancel pending proposals."""
        await self._updates.close()

    async def _hand_over(self, log: PartitionLog, this: object) -> None:
        """Seal and release. Raises what sealing raises, and ``Conflict`` or ``Fenced`` if the record has changed meanwhile."""
        if self._order_of(log) is None:
            return
        self._latest[log] = this
        log.hold(partial(self._release_of, log))
        while log.is_serving and log.is_unsealed:
            await log.seal_all()
        # The partition is still owned here if there was no open ledger whose seal could carry the release.
        release = self._release_of(log)
        if release is not None:
            command = Command(updates=release.updates, requirements=release.requirements)
            log.is_releasing = True
            await self._release(command, log)

    async def _release(self, command: Command, log: PartitionLog) -> None:
        """Propose the command until its outcome is known: once it is refused, no late copy of it can take effect."""
        while True:
            try:
                await self._updates.propose(command, log.requirement.key, RELEASE_TIMEOUT_S)
            except OutcomeUnknown:
                if not log.is_serving:
                    raise
            else:
                return

    def _order_of(self, log: PartitionLog) -> tuple[Partition, int, Broker] | None:
        """Return the current record, its version and the next owner; None if there is nothing to hand over."""
        found = self._view.get(log.requirement.key)
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
        found = self._view.find(Log, log_key(partition.topic_id, partition.index))
        has_ledgers = found is not None and bool(found.ledgers)
        is_small = len(handover_checkpoint) <= (HANDED_BYTES_MAX if has_ledgers else HANDED_WITHOUT_LEDGERS_BYTES_MAX)
        handed = msgspec.structs.replace(
            partition,
            owner=successor.broker_id, owner_session=successor.session_id,
            leader_epoch=partition.leader_epoch + 1, next_owner=NO_OWNER, handed=handover_checkpoint if is_small else b"",
            reassigned_from=None,
        )  # fmt: skip
        requirements = (VersionIs(key=partition.key(), version=version), SessionAlive(session_id=successor.session_id))
        return Release((Put(record=handed),), requirements, b"" if is_small else handover_checkpoint)


async def leave(view: MetadataView, broker_id: int, announce_stop: Callable[[], Awaitable[None]], timeout_s: float) -> None:
    """Ask the controller to reassign this broker's partitions; wait until that is done or ``timeout_s`` has passed.

    Does nothing if no other broker can take partitions.
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
    """Whether another live broker accepts partitions."""
    return any(takes_partitions(view, broker) for broker in view.all(Broker) if broker.broker_id != broker_id)


def takes_partitions(view: MetadataView, broker: Broker) -> bool:
    return not broker.stopping and view.find(DrainedBroker, drained_broker_key(broker.broker_id)) is None


class Owned:
    """Keys of the partitions that a broker owns: read from the view once, then updated with each change."""

    def __init__(self, view: MetadataView, broker_id: int) -> None:
        self._broker_id = broker_id
        self.keys = {partition.key() for partition in view.all(Partition) if partition.owner == broker_id}
        self.changed = asyncio.Event()

    def follow(self, changes: Sequence[Change]) -> None:
        """Apply changes of the view."""
        for change in changes:
            record = change.after.record if change.after is not None else None
            if isinstance(record, Partition) and record.owner == self._broker_id:
                self.keys.add(change.key)
            else:
                self.keys.discard(change.key)
        self.changed.set()
