"""Changes of configs on a broker whose view of the metadata lags: they are decided on what was committed before the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from stratalog_broker.admin.feature_updates import FeatureUpdate, UpgradeType, update_features
from stratalog_broker.admin.named_configs import OF_CLIENT_METRICS, OF_GROUPS
from stratalog_broker.admin.topic_defaults import configure_defaults
from stratalog_core.errors import Conflict
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import (
    CLIENT_METRICS_CONFIGS,
    FEATURES,
    GROUP_CONFIGS,
    DynamicConfig,
    dynamic_config_key,
)
from stratalog_metadata.state.commands import ABSENT, Applied, Command, Put, VersionIs

TIMEOUT_S = 10.0


class LateView(MemoryMetadata):
    """Shows what another broker has written only after a refresh, and refuses commands that were decided before it."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: list[Command] = []

    def written_elsewhere(self, record: DynamicConfig) -> None:
        requirement = VersionIs(key=record.key(), version=ABSENT)
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
