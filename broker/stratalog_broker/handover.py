"""Handing partitions to other owners in good order: what the controller asks for, and what a broker that stops asks for itself.

The owner of a partition whose record names a next owner takes no more appends (clients are told to look for the leader and try
again), waits until every batch is confirmed, seals the ledger, and writes the next owner into the record. So the next owner
finds nothing to recover, and no batch's fate is ever unknown. Reads are served to the last.

What fails changes nothing: the partition stays here, at the same epoch, until the controller asks again or takes it away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stratalog_broker.partition import State
from stratalog_core.errors import StratalogError
from stratalog_core.ids import NO_OWNER
from stratalog_metadata.api import Change, MetadataView
from stratalog_metadata.commands import Command, Put, SessionAlive, VersionIs
from stratalog_metadata.records import Broker, DrainedBroker, Partition, broker_key, drained_broker_key, partition_key

if TYPE_CHECKING:
    from stratalog_broker.context import BrokerServices
    from stratalog_broker.partition_log import PartitionLog
    from stratalog_broker.registration import Registration

_log = logging.getLogger(__name__)


async def hand_over(services: BrokerServices, log: PartitionLog) -> None:
    """Give ``log``'s partition to the next owner that its record names."""
    log.is_leaving = True
    try:
        await _seal(log)
        await _release(services, log)
    except StratalogError as failure:
        _log.info("handing over %s: %s", log.topic_partition, failure)
    finally:
        log.is_leaving = False


async def _seal(log: PartitionLog) -> None:
    """Until everything that was appended is confirmed and sealed. Raises what sealing raises."""
    await log.seal_all()
    while log.is_serving and log.core.state is not State.IDLE:
        await log.seal_all()


async def _release(services: BrokerServices, log: PartitionLog) -> None:
    """Write the next owner. Raises ``Conflict`` or ``SessionExpired`` if the controller has changed its mind meanwhile."""
    identity = log.topic_partition
    found = services.view.get(partition_key(identity.topic_id, identity.partition))
    if found is None or not isinstance(found.record, Partition) or not log.is_serving:
        return
    partition = found.record
    successor = services.view.find(Broker, broker_key(partition.next_owner))
    if successor is None or partition.leader_epoch != log.core.leader_epoch:
        return
    handed = msgspec.structs.replace(
        partition,
        owner=successor.broker_id, owner_session=successor.session_id,
        leader_epoch=partition.leader_epoch + 1, next_owner=NO_OWNER,
    )  # fmt: skip
    requirements = (VersionIs(key=partition.key(), version=found.version), SessionAlive(session_id=successor.session_id))
    await services.metadata.propose(Command(updates=(Put(record=handed),), requirements=requirements))


async def leave(services: BrokerServices, registration: Registration, timeout_s: float) -> None:
    """Ask the controller for other owners, and wait until they have everything, or the time is up.

    Nothing is asked if no other broker could take it.
    """
    broker_id = services.settings.broker_id
    owned = Owned(services.view, broker_id)
    if not others(services.view, broker_id) or not owned.keys:
        return
    unsubscribe = services.view.subscribe(owned.follow)
    try:
        async with asyncio.timeout(timeout_s):
            await registration.announce_stop()
            while owned.keys and others(services.view, broker_id):
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
