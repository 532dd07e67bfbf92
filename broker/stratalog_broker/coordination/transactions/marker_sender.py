"""Sends the markers of decided transactions to the owners of their partitions, for as long as it takes.

One per broker; all of its coordinators share it. ``core/marker_queue.py`` knows what is outstanding. One request per broker is
under way at a time, so markers that are decided meanwhile share the next one. After an error the present owner gets the marker
again: writing one twice is harmless, and losing one is not. The only markers that are given up are those of coordinators that
have resigned, those that a later coordinator has fenced, and those of partitions that a linearizable read does not find.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from stratalog_broker.coordination.transactions.core.marker_queue import Decision, Marker, MarkerQueue
from stratalog_broker.coordination.transactions.core.transaction import EPOCH_BUMP_VERSION, PartitionName
from stratalog_broker.peers.peers import Peers
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Broker, Partition, Record, Topic, broker_key, partition_key, topic_key

RETRY_S: Final = 0.05
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

    def add(self, decision: Decision, partitions: Iterable[PartitionName]) -> None:
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

    def _owner_of(self, partition: PartitionName) -> int | None:
        name, index = partition
        topic = self._metadata.view.find(Topic, topic_key(name))
        found = self._metadata.view.find(Partition, partition_key(topic.topic_id, index)) if topic is not None else None
        if found is None or self._metadata.view.find(Broker, broker_key(found.owner)) is None:
            return None
        return found.owner

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
        view = self._metadata.view
        partitions = {marker.partition for marker in self._queue.held()}
        missing = sorted({name for name, index in partitions if _is_gone(view.find(Topic, topic_key(name)), index)})
        if missing and not self._is_searching:
            self._spawn(self._drop_deleted(missing))
        self._queue.retry()
        self._send_all()

    def _spawn(self, sending: Any) -> None:
        task = asyncio.get_running_loop().create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, broker: int, markers: Sequence[Marker]) -> None:
        written: list[Marker] = []
        try:
            response = await self._peers.call(broker, _KEY, _VERSION, _request(markers), TIMEOUT_S)
            written = list(self._evaluate(broker, markers, response))
        except StratalogError as failure:
            _log.info("%d markers for broker %d will be sent again: %s", len(markers), broker, failure)
        finally:
            complete = self._queue.answered(broker, written)
        self._report(complete)
        self._send_all()

    def _evaluate(self, broker: int, markers: Sequence[Marker], response: Any) -> Iterator[Marker]:
        """Yield the markers that are written."""
        codes = _codes(response)
        for marker in markers:
            code = codes.get((marker.decision.producer_id, marker.partition))
            if code in _WRITTEN:
                yield marker
            elif code is ErrorCode.transaction_coordinator_fenced:
                _log.warning("broker %d knows a later coordinator of %s", broker, marker.decision.transactional_id)
                self._queue.cancel(marker.decision)

    async def _drop_deleted(self, names: Sequence[str]) -> None:
        """Give up the markers of partitions that do not exist; the view may lag, so the metadata quorum is asked.

        A topic may have been deleted and created again with fewer partitions.
        """
        self._is_searching = True
        try:
            found = await self._metadata.read([topic_key(name) for name in names])
        except StratalogError as failure:
            _log.info("could not look for deleted topics: %s", failure)
            return
        finally:
            self._is_searching = False
        topics = {name: each.record if each is not None else None for name, each in zip(names, found, strict=True)}
        dropped = [
            marker
            for marker in self._queue.held()
            if marker.partition[0] in topics and _is_gone(topics[marker.partition[0]], marker.partition[1])
        ]
        self._report(decision for marker in dropped if (decision := self._queue.drop(marker)) is not None)

    def _report(self, complete: Iterable[Decision]) -> None:
        for decision in complete:
            self._completed(decision)


def _is_gone(topic: Record | None, index: int) -> bool:
    """Whether a topic, of which this is the record, lacks the partition."""
    return not isinstance(topic, Topic) or index >= topic.partition_count


def _request(markers: Sequence[Marker]) -> Any:
    """Return the WriteTxnMarkers request of several markers, which are of few decisions and topics."""
    module: Any = load_payload_module(_KEY, _VERSION, EntityType.request)
    decisions: dict[Decision, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for decision, (topic, index) in markers:
        decisions[decision][topic].append(index)
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
