"""Transactions of one broker: the coordinators of transactional ids, their markers, and the expiry of ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from kio.schema.errors import ErrorCode

from stratalog_broker.cluster.producer_ids import ProducerIds
from stratalog_broker.configs.features import TRANSACTION_VERSION, finalized_features
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.coordination.transactions.application import (
    EndedTransaction,
    TransactionApplication,
    completed,
    transaction_kind,
)
from stratalog_broker.coordination.transactions.core.coordinator import ProducerEpoch, TransactionLimits
from stratalog_broker.coordination.transactions.core.transaction import PartitionName
from stratalog_broker.coordination.transactions.marker_sender import MarkerSender
from stratalog_broker.peers.peers import Peers
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Topic, topic_key

_log = logging.getLogger(__name__)


def limits_of(settings: BrokerSettings) -> TransactionLimits:
    """Return the bounds of transactions from the broker's settings."""
    return TransactionLimits(
        timeout_ms_max=settings.transaction_max_timeout_ms,
        expiration_ms=settings.transactional_id_expiration_ms,
        transactional_ids_max=settings.transactional_ids_max,
    )


class TransactionService:
    """One per broker. Adds transactions to the locator."""

    def __init__(
        self,
        settings: BrokerSettings,
        metadata: MetadataClient,
        clock: Clock,
        locator: CoordinatorLocator,
        peers: Peers,
        producer_ids: ProducerIds,
    ) -> None:
        self._view = metadata.view
        self._producer_ids = producer_ids
        self._spare_id: int | None = None
        self._stocking: asyncio.Task[None] | None = None
        self._cleanup_s = settings.transaction_remove_expired_transaction_cleanup_interval_ms / 1000
        self._markers = MarkerSender(metadata, peers, lambda decision: completed(self.coordinators(), decision))
        kind = transaction_kind(
            limits_of(settings),
            clock,
            self._markers,
            lambda: finalized_features(metadata.view).level_of(TRANSACTION_VERSION),
            self._take_spare_id,
            partition_count=settings.transaction_state_log_num_partitions,
            copies=settings.transaction_state_log_replication_factor,
        )
        self._coordinators = locator.add(kind)
        self._expiry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the periodic removal of expired transactional ids."""
        self._expiry = asyncio.get_running_loop().call_later(self._cleanup_s, self._expire)

    def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self._stocking is not None:
            self._stocking.cancel()
        self._markers.close()

    def _expire(self) -> None:
        self._expiry = asyncio.get_running_loop().call_later(self._cleanup_s, self._expire)
        for application in self.coordinators():
            application.expire()

    def coordinator_of(self, transactional_id: str) -> TransactionApplication:
        """Return the coordinator of an id, if that is this broker. Raises as ``Coordinators.coordinator_of`` does."""
        return self._coordinators.coordinator_of(transactional_id)

    def coordinators(self) -> Iterator[TransactionApplication]:
        """Yield the loaded coordinators of this broker."""
        return self._coordinators.loaded()

    @property
    def is_loading(self) -> bool:
        """Whether this broker owns a coordinator partition that it does not serve yet."""
        return self._coordinators.is_loading

    @property
    def unreadable_records(self) -> int:
        """Number of unreadable records of ``__transaction_state`` that this broker's coordinators skipped."""
        return self._coordinators.unreadable_records

    @property
    def outstanding_markers(self) -> int:
        """Number of markers of decided transactions that are not written yet."""
        return self._markers.outstanding

    async def init_producer_id(
        self, transactional_id: str, timeout_ms: int, expected: ProducerEpoch | None
    ) -> ProducerEpoch | ErrorCode:
        """InitProducerId with a transactional id. Raises ``KafkaError``."""
        unused_id = await self._unused_id(transactional_id)
        return await self.coordinator_of(transactional_id).init_producer_id(transactional_id, timeout_ms, expected, unused_id)

    async def add_partitions(
        self, transactional_id: str, producer: ProducerEpoch, added: frozenset[PartitionName], client_version: int
    ) -> ErrorCode:
        """AddPartitionsToTxn and AddOffsetsToTxn. Raises ``KafkaError``."""
        application = self.coordinator_of(transactional_id)
        found = (self._view.find(Topic, topic_key(name)) for name in {name for name, _ in added})
        topic_ids = frozenset((topic.name, topic.topic_id) for topic in found if topic is not None and not topic.internal)
        return await application.add_partitions(transactional_id, producer, added, topic_ids, client_version)

    async def end(
        self, transactional_id: str, producer: ProducerEpoch, *, commit: bool, client_version: int
    ) -> EndedTransaction:
        """EndTxn. Raises ``KafkaError``."""
        unused_id = await self._unused_id(transactional_id)
        application = self.coordinator_of(transactional_id)
        return await application.end(
            transactional_id, producer, commit=commit, client_version=client_version, unused_id=unused_id
        )

    def _take_spare_id(self) -> int | None:
        """Return an unused producer id for an abort that no request asks for; None until the next one is stocked."""
        spare, self._spare_id = self._spare_id, None
        if spare is None and (self._stocking is None or self._stocking.done()):
            self._stocking = asyncio.get_running_loop().create_task(self._stock())
        return spare

    async def _stock(self) -> None:
        try:
            self._spare_id = await self._producer_ids.take()
        except StratalogError as failure:
            _log.info("there is no producer id for the abort of a transaction, which is tried again: %s", failure)

    async def _unused_id(self, transactional_id: str) -> int | None:
        """Return a producer id if the next request for this id may need one."""
        if not self.coordinator_of(transactional_id).coordinator.needs_producer_id(transactional_id):
            return None
        try:
            return await self._producer_ids.take()
        except StratalogError as failure:
            # Clients retry.
            raise KafkaError(ErrorCode.coordinator_load_in_progress, failure.message) from failure
