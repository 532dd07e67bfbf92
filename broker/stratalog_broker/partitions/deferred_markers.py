"""Ends the transactions that were decided while a partition's topic was deleted, when the topic has been restored.

Their outcomes are ``DeferredMarker`` records. The first owner after the restore appends the markers before any other batch, so
that a log with a later batch of such a producer has its marker, too. A record stays until its marker is confirmed. If the owner
is lost before it has removed the record, the next one must not end a later transaction of the producer by it: that began in a
later leader epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.pending_batch import Acks, Outcome
from stratalog_core.batches.batch import read_header
from stratalog_core.errors import StratalogError
from stratalog_core.partition_state.transactions import ABORT, COMMIT, build_marker
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.records import DeferredMarker, Versioned, deferred_markers_prefix
from stratalog_metadata.state.commands import Command, Delete, VersionIs

REMOVED_AT_ONCE: Final = 500
RETRY_S: Final = 0.5
_log = logging.getLogger(__name__)


def write_deferred_markers(
    metadata: MetadataClient, log: PartitionLog, clock: Clock, spawn: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """Append the deferred markers of a partition that is not served yet, and spawn what removes their records.

    If the partition is lost meanwhile, its next owner goes on. Raises what ``PartitionLog.append`` raises; ``log`` has resigned
    then.
    """
    found = _deferred(metadata.view, log)
    if not found:
        return
    try:
        written = [_append(log, record, clock) for record in _wanted(log, found)]
    except StratalogError as failure:
        log.resign(failure)
        raise
    _log.info("%s has %d deferred markers, %d of them end a transaction", log.topic_partition, len(found), len(written))
    spawn(_remove(metadata, log, written))


def _deferred(view: MetadataView, log: PartitionLog) -> Sequence[Versioned]:
    identity = log.topic_partition
    return view.with_prefix(deferred_markers_prefix(identity.topic_id, identity.partition))


def _wanted(log: PartitionLog, found: Sequence[Versioned]) -> Iterator[DeferredMarker]:
    """Yield those that end a transaction, the oldest deletion first. Each must be appended before the next is asked for."""
    records = [each.record for each in found if isinstance(each.record, DeferredMarker)]
    for record in sorted(records, key=lambda each: each.leader_epoch):
        first_offset = log.core.appended_transactions.first_offsets.get(record.producer_id)
        if first_offset is not None and log.core.epoch_at(first_offset) <= record.leader_epoch:
            yield record


def _append(log: PartitionLog, record: DeferredMarker, clock: Clock) -> asyncio.Future[Outcome]:
    done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def settle(outcome: Outcome) -> None:
        if not done.done():
            done.set_result(outcome)

    batch = build_marker(
        COMMIT if record.is_commit else ABORT, record.producer_id, record.producer_epoch, record.coordinator_epoch,
        clock.wall_ms(),
    )  # fmt: skip
    # With acks=0 it is queued while too few bookies are there for another ledger: readers need not wait for them.
    log.append(memoryview(batch), read_header(batch), Acks.NONE, settle)
    return done


async def _remove(metadata: MetadataClient, log: PartitionLog, written: Sequence[asyncio.Future[Outcome]]) -> None:
    """Remove the partition's records once the quorum has the markers."""
    if not all(isinstance(outcome, int) for outcome in await asyncio.gather(*written)):
        return
    while log.is_serving and (found := _deferred(metadata.view, log)[:REMOVED_AT_ONCE]):
        keys = {each.record.key(): each.version for each in found}
        unchanged = (VersionIs(key=key, version=version) for key, version in keys.items())
        command = Command(updates=tuple(Delete(key=key) for key in keys), requirements=(log.requirement, *unchanged))
        try:
            await metadata.propose(command)
        except StratalogError as failure:
            _log.info("removing deferred markers of %s: %s", log.topic_partition, failure)
            await asyncio.sleep(RETRY_S)
