"""Features: what ApiVersions announces, and which updates are accepted, in every version over the wire."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.handlers.test_every_version import versions
from unit.broker.mini_cluster import MiniCluster
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.admin import feature_updates
from stratalog_broker.configs import features
from stratalog_broker.configs.features import Feature
from stratalog_broker.handlers import api_versions

SECONDS = datetime.timedelta(seconds=10)
LEVEL = 2


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster has one feature."""
    known = (Feature(name="example.version", level=LEVEL),)
    monkeypatch.setattr(features, "FEATURES", known)
    monkeypatch.setattr(api_versions, "FEATURES", known)


async def update(client: WireClient, version: int, name: str, level: int, *, upgrade_type: int = 1) -> Any:
    row = part(
        57, version, "FeatureUpdateKey",
        feature=name, max_version_level=level, upgrade_type=upgrade_type, allow_downgrade=upgrade_type > 1,
    )  # fmt: skip
    answer = await client.send(57, version, timeout=SECONDS, feature_updates=(row,), validate_only=False)
    return answer if version >= 2 else answer.results[0]


async def test_api_versions_announces_each_feature_at_its_level(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        for version in versions(18):
            answer = await client.send(18, version, client_software_name="wire", client_software_version="1")
            if version >= 3:
                (supported,), (finalized,) = answer.supported_features, answer.finalized_features
                assert (supported.name, supported.min_version, supported.max_version) == ("example.version", LEVEL, LEVEL)
                assert (finalized.min_version_level, finalized.max_version_level) == (LEVEL, LEVEL)
                assert answer.finalized_features_epoch >= 0


async def test_only_an_update_to_the_level_in_force_succeeds(mini_cluster: MiniCluster) -> None:
    refused = ErrorCode.invalid_update_version
    async with connect(mini_cluster.bootstrap) as client:
        for version in versions(57):
            assert (await update(client, version, "example.version", LEVEL)).error_code is ErrorCode.none
            assert (await update(client, version, "unknown.version", 0, upgrade_type=2)).error_code is refused
            answer = await update(client, version, "example.version", LEVEL - 1, upgrade_type=2)
            assert (answer.error_code, "only supports level 2" in answer.error_message) == (refused, True)
            answer = await update(client, version, "unknown.version", 1)
            assert (answer.error_code, "is not supported" in answer.error_message) == (refused, True)
        assert (await update(client, 2, "example.version", LEVEL, upgrade_type=9)).error_code is refused


def test_the_types_of_upgrades_are_kafkas() -> None:
    assert [one.value for one in feature_updates.UpgradeType] == [1, 2, 3]
