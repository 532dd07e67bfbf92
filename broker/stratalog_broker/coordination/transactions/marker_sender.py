"""Sends the markers of decided transactions to the owners of their partitions, for as long as it takes.

One per broker; all of its coordinators share it. ``core/marker_queue.py`` knows what is outstanding. One request per broker is
under way at a time, so markers that are decided meanwhile share the next one. After an error the present owner gets the marker
again: writing one twice is harmless, and losing one is not. The only markers that are given up are those of coordinators that
have resigned, those that a later coordinator has fenced, and those of partitions that a linearizable read does not find; if
their topic may be restored, they are deferred (``deferral.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from stratalog_broker.coordination.transactions.core.marker_queue import Decision, Marker, MarkerQueue
from stratalog_broker.coordination.transactions.core.transaction import (
    EPOCH_BUMP_VERSION,
    NO_TOPIC_ID,
    MarkedPartition,
    PartitionName,
)
from stratalog_broker.coordination.transactions.deferral import settle_deleted
from stratalog_broker.peers.peers import Peers
from stratalog_core.errors import Overloaded, StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Broker, Partition, Topic, broker_key, partition_key, topic_key

RETRY_S: Final = 0.05
SEARCH_RETRY_S: Final = 0.5
SEARCHED_AT_ONCE: Final = 500
"""Markers of missing partitions that share a command."""
TIMEOUT_S: Final = 10.0
_KEY: Final = 27
_VERSION: Final = 2
_log = logging.getLogger(__name__)
_WRITTEN: Final = frozenset({ErrorCode.none, ErrorCode.invalid_producer_epoch})
"""INVALID_PRODUCER_EPOCH: the partition has a later epoch of the producer, so an earlier transaction is not open there."""


class MarkerSender:
    """``completed`` is called with each decision whose partitions all have their marker."""

    def __init__(self, metadata: MetadataClient, peers: Peers, completed: Callable[[Decision], None]) -> None:
        self._metadata = metadata
        self._peers = peers
        self._completed = completed
        self._queue = MarkerQueue(self._owner_of)
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_scheduled = False
        self._is_searching = False

    @property
    def outstanding(self) -> int:
        """Number of markers that are not written yet."""
        return len(self._queue)

    def add(self, decision: Decision, partitions: Iterable[MarkedPartition]) -> None:
        """Send the markers of a decided transaction."""
        self._queue.add(decision, partitions)
        self._schedule()

    def forget(self, coordinator: int) -> None:
        """Stop sending the markers of a coordinator that has resigned."""
        self._queue.forget(coordinator)

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        for task in self._tasks:
            task.cancel()

    def _owner_of(self, partition: MarkedPartition) -> int | None:
        topic_id = self._topic_id_of(partition)
        found = (
            self._metadata.view.find(Partition, partition_key(topic_id, partition.partition)) if topic_id is not None else None
        )
        if found is None or self._metadata.view.find(Broker, broker_key(found.owner)) is None:
            return None
        return found.owner

    def _topic_id_of(self, partition: MarkedPartition) -> UUID | None:
        if partition.topic_id != NO_TOPIC_ID:
            return partition.topic_id
        topic = self._metadata.view.find(Topic, topic_key(partition.topic))
        return topic.topic_id if topic is not None else None

    def _is_missing(self, partition: MarkedPartition) -> bool:
        """Whether the view has no such partition."""
        topic_id = self._topic_id_of(partition)
        return topic_id is None or self._metadata.view.get(partition_key(topic_id, partition.partition)) is None

    def _name_of(self, partition: MarkedPartition) -> PartitionName | None:
        """Return a partition by its topic's present name: a deleted topic may have been restored under another one."""
        topic = self._metadata.view.find(Topic, topic_key(partition.topic))
        if topic is None or partition.topic_id not in (NO_TOPIC_ID, topic.topic_id):
            topics = self._metadata.view.all(Topic)
            topic = next((each for each in topics if each.topic_id == partition.topic_id), None)
        return (topic.name, partition.partition) if topic is not None else None

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        self._is_scheduled = False
        for broker, markers in self._queue.next_requests():
            self._spawn(self._send(broker, markers))
        if self._queue.has_held and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._send_again)

    def _send_again(self) -> None:
        self._retry = None
        missing = [marker for marker in self._queue.held() if self._is_missing(marker.partition)]
        if missing and not self._is_searching:
            self._is_searching = True
            self._spawn(self._settle_deleted(missing[:SEARCHED_AT_ONCE]))
        self._queue.retry()
        self._send_all()

    def _spawn(self, sending: Any) -> None:
        task = asyncio.get_running_loop().create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, broker: int, markers: Sequence[Marker]) -> None:
        names = {marker: name for marker in markers if (name := self._name_of(marker.partition)) is not None}
        written: list[Marker] = []
        try:
            response = await self._peers.call(broker, _KEY, _VERSION, _request(names), TIMEOUT_S)
            written = list(self._evaluate(broker, names, response))
        except StratalogError as failure:
            _log.info("%d markers for broker %d will be sent again: %s", len(markers), broker, failure)
        finally:
            complete = self._queue.answered(broker, written)
        self._report(complete)
        self._send_all()

    def _evaluate(self, broker: int, names: Mapping[Marker, PartitionName], response: Any) -> Iterator[Marker]:
        """Yield the markers that are written.

        Requests name topics: if the topic was deleted meanwhile, another one of its name may have got the marker.
        """
        codes = _codes(response)
        for marker, name in names.items():
            code = codes.get((marker.decision.producer_id, name))
            if code in _WRITTEN:
                if self._name_of(marker.partition) == name:
                    yield marker
            elif code is ErrorCode.transaction_coordinator_fenced:
                _log.warning("broker %d knows a later coordinator of %s", broker, marker.decision.transactional_id)
                self._queue.cancel(marker.decision)

    async def _settle_deleted(self, markers: Sequence[Marker]) -> None:
        """Give up or defer the markers of deleted partitions; the view may lag, so the metadata quorum is asked."""
        try:
            settled = await settle_deleted(self._metadata, markers)
        except StratalogError as failure:
            level = logging.WARNING if isinstance(failure, Overloaded) else logging.INFO
            _log.log(level, "%d markers of missing partitions wait: %s", len(markers), failure)
            await asyncio.sleep(SEARCH_RETRY_S)
            return
        finally:
            self._is_searching = False
        complete = (self._queue.drop(marker, instead) for marker, instead in settled)
        self._report([decision for decision in complete if decision is not None])
        self._schedule()

    def _report(self, complete: Iterable[Decision]) -> None:
        for decision in complete:
            self._completed(decision)


def _request(names: Mapping[Marker, PartitionName]) -> Any:
    """Return the WriteTxnMarkers request of several markers, which are of few decisions and topics."""
    module: Any = load_payload_module(_KEY, _VERSION, EntityType.request)
    decisions: dict[Decision, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for marker, (topic, index) in names.items():
        decisions[marker.decision][topic].append(index)
    return module.WriteTxnMarkersRequest(
        markers=tuple(
            module.WritableTxnMarker(
                producer_id=decision.producer_id,
                producer_epoch=decision.producer_epoch,
                transaction_result=decision.is_commit,
                topics=tuple(
                    module.WritableTxnMarkerTopic(name=topic, partition_indexes=tuple(indexes))
                    for topic, indexes in topics.items()
                ),
                coordinator_epoch=decision.coordinator_epoch,
                transaction_version=decision.version if decision.version >= EPOCH_BUMP_VERSION else 0,
            )
            for decision, topics in decisions.items()
        )
    )


def _codes(response: Any) -> dict[tuple[int, PartitionName], ErrorCode]:
    return {
        (result.producer_id, (topic.name, row.partition_index)): row.error_code
        for result in response.markers
        for topic in result.topics
        for row in topic.partitions
    }
