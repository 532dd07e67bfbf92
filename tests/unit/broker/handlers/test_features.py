"""Features: what ApiVersions announces, and which updates are accepted, in every version over the wire."""

from __future__ import annotations

import datetime
from typing import Any

from kio.schema.errors import ErrorCode
from unit.broker.handlers.test_every_version import versions
from unit.broker.mini_cluster import MiniCluster
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.admin.feature_updates import UpgradeType
from stratalog_broker.admin.view_waiting import wait_until
from stratalog_broker.configs.features import FEATURES, TRANSACTION_VERSION, finalized_features

SECONDS = datetime.timedelta(seconds=60)
UP, DOWN = UpgradeType.UPGRADE, UpgradeType.SAFE_DOWNGRADE


async def update(
    client: WireClient, version: int, *rows: tuple[str, int], upgrade_type: int = UP, validate_only: bool = False
) -> Any:
    updates = tuple(
        part(
            57, version, "FeatureUpdateKey",
            feature=name, max_version_level=level, upgrade_type=upgrade_type, allow_downgrade=upgrade_type > UP,
        )
        for name, level in rows
    )  # fmt: skip
    return await client.send(57, version, timeout=SECONDS, feature_updates=updates, validate_only=validate_only)


async def announced(client: WireClient, version: int = 4) -> Any:
    return await client.send(18, version, client_software_name="wire", client_software_version="1")


async def levels(client: WireClient) -> dict[str, int]:
    return {one.name: one.max_version_level for one in (await announced(client)).finalized_features}


async def until_in_force(cluster: MiniCluster, level: int) -> None:
    view = cluster.broker.metadata.view
    assert await wait_until(view, lambda: finalized_features(view).level_of(TRANSACTION_VERSION) == level, 60)


async def test_api_versions_announces_each_feature_at_its_highest_level(mini_cluster: MiniCluster) -> None:
    highest = {one.name: one.max_level for one in FEATURES}
    async with connect(mini_cluster.bootstrap) as client:
        assert await levels(client) == highest
        for version in versions(18):
            answer = await announced(client, version)
            if version >= 3:
                assert {one.name: one.min_version_level for one in answer.finalized_features} == highest
                supported = {one.name: (one.min_version, one.max_version) for one in answer.supported_features}
                assert supported == ({name: (0, level) for name, level in highest.items()} if version >= 4 else {})


async def test_levels_go_down_and_up_as_in_kafka(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        epoch = (await announced(client)).finalized_features_epoch
        for version in versions(57):
            for level, kind in ((1, DOWN), (0, DOWN), (0, UP), (2, UP)):
                answer = await update(client, version, (TRANSACTION_VERSION, level), upgrade_type=kind)
                assert answer.error_code is ErrorCode.none
                if version < 2:
                    assert [row.error_code for row in answer.results] == [ErrorCode.none]
                await until_in_force(mini_cluster, level)
                # Kafka finalizes no feature at level 0.
                assert (await levels(client)).get(TRANSACTION_VERSION, 0) == level
        assert (await announced(client)).finalized_features_epoch > epoch


async def test_a_refusal_names_the_feature_and_changes_nothing(mini_cluster: MiniCluster) -> None:
    refusals = (
        ((TRANSACTION_VERSION, 3), UP, "only supports levels 0-2"),
        ((TRANSACTION_VERSION, 1), UP, "upgrade type"),
        ((TRANSACTION_VERSION, -1), DOWN, "less than 0"),
        (("unknown.version", 1), UP, "unknown.version: this feature is not supported"),
        (("unknown.version", 0), DOWN, "not supported"),
    )
    async with connect(mini_cluster.bootstrap) as client:
        before = await announced(client)
        for version in versions(57):
            for row, kind, reason in refusals:
                answer = await update(client, version, (TRANSACTION_VERSION, 2), row, upgrade_type=kind)
                assert (answer.error_code, reason in answer.error_message) == (ErrorCode.invalid_update_version, True)
                assert version == 2 or answer.results == ()
        answer = await update(client, 2, (TRANSACTION_VERSION, 2), upgrade_type=9)
        assert answer.error_code is ErrorCode.invalid_update_version
        assert (await update(client, 2, (TRANSACTION_VERSION, 0), upgrade_type=DOWN, validate_only=True)).error_code == 0
        assert await announced(client) == before


async def test_a_downgrade_does_not_raise_a_level(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await update(client, 2, (TRANSACTION_VERSION, 0), upgrade_type=DOWN)
        await until_in_force(mini_cluster, 0)
        answer = await update(client, 2, (TRANSACTION_VERSION, 1), upgrade_type=UpgradeType.UNSAFE_DOWNGRADE)
        assert (answer.error_code, "cannot raise" in answer.error_message) == (ErrorCode.invalid_update_version, True)


def test_the_types_of_upgrades_are_kafkas() -> None:
    assert [one.value for one in UpgradeType] == [1, 2, 3]
