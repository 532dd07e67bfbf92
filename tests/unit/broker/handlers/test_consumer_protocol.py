"""ConsumerGroupHeartbeat and ConsumerGroupDescribe in every version over the wire, and the requests of both group protocols."""

from __future__ import annotations

import datetime
from typing import Any

from kio.schema.errors import ErrorCode
from unit.broker.handlers.test_every_version import GROUP, create, find, versions
from unit.broker.mini_cluster import MiniCluster
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.admin.feature_updates import UpgradeType
from stratalog_broker.admin.view_waiting import wait_until
from stratalog_broker.configs.features import GROUP_VERSION, finalized_features

SECONDS = datetime.timedelta(seconds=60)
TOPIC = "flights"
HEARTBEAT, DESCRIBE = 68, 69


async def beat(client: WireClient, version: int, member_id: str, epoch: int, **fields: Any) -> Any:
    """Send a heartbeat; one with epoch 0 joins."""
    joining: dict[str, Any] = {
        "rebalance_timeout": SECONDS, "subscribed_topic_names": (TOPIC,), "topic_partitions": (),
    } if epoch == 0 else {}  # fmt: skip
    values = {
        "group_id": GROUP, "member_id": member_id, "member_epoch": epoch, "instance_id": None, "rack_id": None,
        "rebalance_timeout": datetime.timedelta(milliseconds=-1), "subscribed_topic_names": None,
        "subscribed_topic_regex": None, "server_assignor": None, "topic_partitions": None,
    }  # fmt: skip
    return await client.send(HEARTBEAT, version, **{**values, **joining, **fields})


async def describe(client: WireClient, version: int, group_id: str = GROUP) -> Any:
    (row,) = (await client.send(DESCRIBE, version, group_ids=(group_id,), include_authorized_operations=True)).groups
    return row


async def test_a_member_joins_and_leaves(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, TOPIC)
        await find(client, 4)
        for version in versions(HEARTBEAT):
            joined = await beat(client, version, "" if version == 0 else "me", 0)
            assert joined.error_code is ErrorCode.none, joined.error_message
            assert joined.member_id == "me" or version == 0
            assert joined.heartbeat_interval == datetime.timedelta(seconds=5)
            (assigned,) = joined.assignment.topic_partitions
            assert assigned.partitions == (0, 1)
            again = await beat(client, version, joined.member_id, joined.member_epoch)
            assert (again.error_code, again.assignment) == (ErrorCode.none, None)
            fenced = await beat(client, version, joined.member_id, joined.member_epoch + 1)
            assert fenced.error_code is ErrorCode.fenced_member_epoch
            left = await beat(client, version, joined.member_id, -1)
            assert (left.error_code, left.member_epoch) == (ErrorCode.none, -1)
            unknown = await beat(client, version, joined.member_id, joined.member_epoch)
            assert unknown.error_code is ErrorCode.unknown_member_id
        assert (await beat(client, 1, "", 0)).error_code is ErrorCode.invalid_request
        assert (await beat(client, 1, "me", 0, group_id=" ")).error_code is ErrorCode.invalid_request
        pattern = await beat(client, 1, "me", 0, subscribed_topic_names=None, subscribed_topic_regex="fl(")
        assert pattern.error_code is ErrorCode.invalid_regular_expression


async def test_a_group_is_described(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, TOPIC)
        await find(client, 4)
        await beat(client, 1, "me", 0, instance_id="static", rack_id="rack", server_assignor="range")
        for version in versions(DESCRIBE):
            row = await describe(client, version)
            assert (row.error_code, row.group_state, row.assignor_name) == (ErrorCode.none, "Stable", "range")
            assert (row.group_epoch, row.assignment_epoch) == (1, 1)
            (member,) = row.members
            assert (member.member_id, member.instance_id, member.rack_id, member.member_epoch) == ("me", "static", "rack", 1)
            assert member.subscribed_topic_names == (TOPIC,)
            for assignment in (member.assignment, member.target_assignment):
                (topic,) = assignment.topic_partitions
                assert (topic.topic_name, topic.partitions) == (TOPIC, (0, 1))
            assert version == 0 or member.member_type == 1
            missing = await describe(client, version, "unknown")
            assert (missing.error_code, missing.error_message) == (ErrorCode.group_id_not_found, "Group unknown not found.")
        classic = (await client.send(15, 6, groups=(GROUP,), include_authorized_operations=False)).groups[0]
        assert (classic.error_code, classic.group_state) == (ErrorCode.group_id_not_found, "Dead")
        for types, expected in (((), [GROUP]), (("consumer",), [GROUP]), (("classic",), [])):
            listed = await client.send(16, 5, states_filter=(), types_filter=types)
            assert [group.group_id for group in listed.groups] == expected


async def test_offsets_are_checked_by_member_epoch(mini_cluster: MiniCluster) -> None:
    async def commit(version: int, epoch: int) -> ErrorCode:
        row = part(8, version, "OffsetCommitRequestPartition", partition_index=0, committed_offset=1, committed_metadata="")
        topic = part(8, version, "OffsetCommitRequestTopic", name=TOPIC, partitions=(row,))
        answer = await client.send(
            8, version, group_id=GROUP, generation_id_or_member_epoch=epoch, member_id="me", topics=(topic,)
        )
        return ErrorCode(answer.topics[0].partitions[0].error_code)

    async def fetch(member_id: str | None, epoch: int) -> ErrorCode:
        topic = part(9, 9, "OffsetFetchRequestTopics", name=TOPIC, partition_indexes=(0,))
        group = part(9, 9, "OffsetFetchRequestGroup", group_id=GROUP, member_id=member_id, member_epoch=epoch, topics=(topic,))
        return ErrorCode((await client.send(9, 9, groups=(group,), require_stable=False)).groups[0].error_code)

    async with connect(mini_cluster.bootstrap) as client:
        await create(client, TOPIC)
        await find(client, 4)
        await beat(client, 1, "me", 0)
        assert await commit(9, 1) is ErrorCode.none
        assert await commit(9, 2) is ErrorCode.stale_member_epoch
        assert await commit(8, 1) is ErrorCode.unsupported_version
        assert await fetch("me", 1) is ErrorCode.none
        assert await fetch("me", 2) is ErrorCode.stale_member_epoch
        assert await fetch("you", 1) is ErrorCode.unknown_member_id
        assert await fetch(None, -1) is ErrorCode.none


async def test_the_protocol_is_refused_below_its_feature_level(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        downgrade = UpgradeType.SAFE_DOWNGRADE
        row = part(57, 1, "FeatureUpdateKey", feature=GROUP_VERSION, max_version_level=0, upgrade_type=downgrade)
        await client.send(57, 1, timeout=SECONDS, feature_updates=(row,), validate_only=False)
        view = mini_cluster.broker.metadata.view
        assert await wait_until(view, lambda: finalized_features(view).level_of(GROUP_VERSION) == 0, 60)
        assert (await beat(client, 1, "me", 0)).error_code is ErrorCode.unsupported_version
        assert (await describe(client, 1)).error_code is ErrorCode.unsupported_version
