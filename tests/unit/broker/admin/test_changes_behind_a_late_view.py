"""Changes on a broker whose view of the metadata lags: they are decided on what was committed before the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

import msgspec
import pytest

from stratalog_broker.admin.feature_updates import FeatureUpdate, UpgradeType, update_features
from stratalog_broker.admin.named_configs import OF_CLIENT_METRICS, OF_GROUPS
from stratalog_broker.admin.ownership_orders import NamedPartition, OwnershipOrders
from stratalog_broker.admin.topic_defaults import configure_defaults
from stratalog_core.errors import Conflict
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import (
    CLIENT_METRICS_CONFIGS,
    FEATURES,
    GROUP_CONFIGS,
    Broker,
    DynamicConfig,
    Partition,
    Topic,
    dynamic_config_key,
)
from stratalog_metadata.state.commands import ABSENT, Applied, Command, Put, VersionIs

TIMEOUT_S: Final = 10.0
TOPIC: Final = Topic(name="orders", topic_id=UUID(int=1), partition_count=1, replication_factor=2)
NAME: Final = NamedPartition(TOPIC.name, 0)
AT_FIRST: Final = Partition(topic_id=TOPIC.topic_id, index=0, owner=1, replicas=(1, 2))


class LateView(MemoryMetadata):
    """Shows what another broker has written only after a refresh, and refuses commands that were decided before it."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: list[Command] = []

    def written_elsewhere(self, record: DynamicConfig | Partition) -> None:
        stored = self.view.get(record.key())
        requirement = VersionIs(key=record.key(), version=ABSENT if stored is None else stored.version)
        self._hidden.append(Command(updates=(Put(record=record),), requirements=(requirement,)))

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        if self._hidden:
            raise Conflict("the record has changed")
        return await super().propose(command, timeout_s)

    async def refresh(self, timeout_s: float = 10.0) -> int:
        hidden, self._hidden = self._hidden, []
        for command in hidden:
            await super().propose(command, timeout_s)
        return self.index


async def _empty_group(metadata: LateView) -> None:
    await OF_GROUPS.configure(metadata, "billing", lambda _: {}, TIMEOUT_S, validate_only=False)


async def _empty_subscription(metadata: LateView) -> None:
    await OF_CLIENT_METRICS.configure(metadata, "latencies", lambda _: {}, TIMEOUT_S, validate_only=False)


async def _empty_defaults(metadata: LateView) -> None:
    await configure_defaults(metadata, lambda _: {}, TIMEOUT_S, validate_only=False)


@pytest.mark.parametrize(
    ("written", "remove"),
    [
        (DynamicConfig(resource=f"{GROUP_CONFIGS}billing", configs={"consumer.session.timeout.ms": "50000"}), _empty_group),
        (DynamicConfig(resource=f"{CLIENT_METRICS_CONFIGS}latencies", configs={"metrics": "a"}), _empty_subscription),
        (DynamicConfig(resource="", configs={"retention.ms": "5000"}), _empty_defaults),
    ],
    ids=["group", "client metrics", "topic defaults"],
)
async def test_configs_that_the_view_lacks_are_deleted(
    written: DynamicConfig, remove: Callable[[LateView], Awaitable[None]]
) -> None:
    """A view without them showed that nothing had to change, and the request was answered as done."""
    metadata = LateView()
    metadata.written_elsewhere(written)

    await remove(metadata)

    await metadata.refresh()
    left = metadata.find(DynamicConfig, dynamic_config_key(written.resource))
    assert left is None or not left.configs


async def test_a_feature_is_set_back_to_the_level_that_the_view_still_has() -> None:
    metadata = LateView()
    metadata.written_elsewhere(DynamicConfig(resource=FEATURES, configs={"transaction.version": "1"}))
    update = FeatureUpdate(name="transaction.version", level=2, upgrade_type=UpgradeType.UPGRADE)

    await update_features(metadata, [update], TIMEOUT_S, validate_only=False)

    await metadata.refresh()
    stored = metadata.find(DynamicConfig, dynamic_config_key(FEATURES))
    assert stored is not None
    assert stored.configs["transaction.version"] == "2"


async def _with_two_brokers() -> LateView:
    metadata = LateView()
    for broker_id in (1, 2):
        session = await metadata.open_session(f"broker-{broker_id}", 60_000, lambda: None)
        broker = Broker(broker_id=broker_id, session_id=session, host="localhost", port=9092)
        await metadata.propose(Command(updates=(Put(record=broker),)))
    await metadata.propose(Command(updates=(Put(record=TOPIC), Put(record=AT_FIRST))))
    return metadata


def _partition(metadata: LateView) -> Partition:
    stored = metadata.find(Partition, AT_FIRST.key())
    assert stored is not None
    return stored


@pytest.mark.parametrize("replicas", [(1, 2), None], ids=["reassigned back", "cancelled"])
async def test_a_reassignment_that_the_view_lacks_is_ended(replicas: tuple[int, ...] | None) -> None:
    """The partition seemed to be where it was wanted: the request was answered as done, and the partition moved."""
    metadata = await _with_two_brokers()
    metadata.written_elsewhere(msgspec.structs.replace(AT_FIRST, replicas=(2, 1), next_owner=2, reassigned_from=(1, 2)))

    outcomes = await OwnershipOrders(metadata).reassign({NAME: replicas}, TIMEOUT_S, may_change_factor=False)

    await metadata.refresh()
    assert outcomes == {NAME: None}
    assert _partition(metadata) == AT_FIRST


async def test_a_partition_that_the_view_shows_at_its_preferred_leader_is_moved_there() -> None:
    metadata = await _with_two_brokers()
    metadata.written_elsewhere(msgspec.structs.replace(AT_FIRST, owner=2))

    await OwnershipOrders(metadata).elect_preferred([NAME], timeout_s=0.05)

    await metadata.refresh()
    assert _partition(metadata).next_owner == 1
