"""Every version of every group and administration API, from join to deletion, over the wire."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, until_all_served
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.handlers import HANDLERS
from stratalog_metadata.records import Topic, topic_key

NONE = ErrorCode.none
SECONDS = datetime.timedelta(seconds=60)
GROUP = "group"


def versions(api_key: int) -> range:
    return range(HANDLERS[api_key].min_version, HANDLERS[api_key].max_version + 1)


async def create(client: WireClient, *names: str, version: int = 7, configs: dict[str, str] | None = None) -> Any:
    rows = tuple(part(19, version, "CreatableTopicConfig", name=name, value=value) for name, value in (configs or {}).items())
    topics = tuple(
        part(19, version, "CreatableTopic", name=name, num_partitions=2, replication_factor=1, assignments=(), configs=rows)
        for name in names
    )
    return await client.send(19, version, topics=topics, timeout=SECONDS, validate_only=False)


async def find(client: WireClient, version: int) -> Any:
    """Return the group's coordinator, after it has loaded its groups."""
    answer = await client.send(10, version, key=GROUP, key_type=0, coordinator_keys=(GROUP,))
    async with asyncio.timeout(WAIT_S):
        while (await client.send(16, 0)).error_code is ErrorCode.coordinator_load_in_progress:
            pass
    return answer.coordinators[0] if version >= 4 else answer


async def join(client: WireClient, version: int) -> tuple[str, Any]:
    protocols = (part(11, version, "JoinGroupRequestProtocol", name="range", metadata=b"topics"),)
    member_id = ""
    for _ in range(2):
        answer = await client.send(
            11, version, group_id=GROUP, session_timeout=SECONDS, rebalance_timeout=SECONDS, member_id=member_id,
            group_instance_id=None, protocol_type="consumer", protocols=protocols, reason=None,
        )  # fmt: skip
        member_id = answer.member_id
        if answer.error_code is NONE:
            break
        assert answer.error_code is ErrorCode.member_id_required
    return member_id, answer


async def test_find_coordinator_join_and_leave(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        for version in versions(10):
            found = await find(client, version)
            assert (found.error_code, found.node_id) == (NONE, 1)
        for version in versions(11):
            member_id, joined = await join(client, version)
            assert (joined.error_code, joined.leader, len(joined.members)) == (NONE, member_id, 1)
            identity = {"group_id": GROUP, "generation_id": joined.generation_id, "member_id": member_id}
            await sync_and_beat(client, identity, min(version, 5), min(version, 4))
            await leave(client, member_id, min(version, 5))


async def sync_and_beat(client: WireClient, identity: dict[str, Any], sync: int, beat: int) -> None:
    rows = (part(14, sync, "SyncGroupRequestAssignment", member_id=identity["member_id"], assignment=b"all"),)
    answer = await client.send(
        14, sync, **identity, group_instance_id=None, protocol_type="consumer", protocol_name="range", assignments=rows
    )
    assert (answer.error_code, answer.assignment) == (NONE, b"all")
    answer = await client.send(12, beat, **identity, group_instance_id=None)
    assert answer.error_code is NONE
    for version in versions(15):
        described = await client.send(15, version, groups=(GROUP, "unknown"), include_authorized_operations=False)
        known, unknown = described.groups
        assert (known.group_state, known.protocol_data, len(known.members)) == ("Stable", "range", 1)
        assert known.members[0].client_host == "/127.0.0.1"
        assert unknown.group_state == "Dead"
        assert unknown.error_code is (ErrorCode.group_id_not_found if version >= 6 else NONE)
    for version in versions(16):
        listed = await client.send(16, version, states_filter=("stable",), types_filter=("Classic",))
        assert [row.group_id for row in listed.groups] == [GROUP]


async def leave(client: WireClient, member_id: str, version: int) -> None:
    rows = (part(13, version, "MemberIdentity", member_id=member_id, group_instance_id=None, reason=None),)
    answer = await client.send(13, version, group_id=GROUP, member_id=member_id, members=rows)
    assert answer.error_code is NONE
    if version >= 3:
        assert [(row.member_id, row.error_code) for row in answer.members] == [(member_id, NONE)]


async def test_committing_and_fetching(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        topic = mini_cluster.broker.metadata.view.find(Topic, topic_key("flights"))
        assert topic is not None
        await find(client, 6)
        for version in versions(8):
            answer = await commit(client, version, topic, offset=version)
            assert [row.error_code for row in answer.topics[0].partitions] == [NONE]
            for fetching in versions(9):
                assert await fetch(client, fetching, topic) == [(version, NONE), (-1, NONE)]
        answer = await client.send(47, 0, group_id=GROUP, topics=(deletion("flights", 0, 1),))
        assert answer.error_code is NONE
        assert [row.error_code for row in answer.topics[0].partitions] == [NONE, NONE]
        assert await fetch(client, 9, topic) == [(-1, NONE), (-1, NONE)]


async def test_offsets_of_partitions_that_do_not_exist(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        topic = mini_cluster.broker.metadata.view.find(Topic, topic_key("flights"))
        assert topic is not None
        await find(client, 6)
        unknown = ErrorCode.unknown_topic_or_partition
        for version in versions(8):
            for index, expected in ((-1, unknown), (1, NONE), (2, unknown)):
                answer = await commit(client, version, topic, offset=1, partition=index)
                assert [row.error_code for row in answer.topics[0].partitions] == [expected]
        topics = (deletion("flights", 1, 2), deletion("trains", 0), deletion("flights", 0))
        answer = await client.send(47, 0, group_id=GROUP, topics=topics)
        assert answer.error_code is NONE
        assert [[row.error_code for row in each.partitions] for each in answer.topics] == [[NONE, unknown], [unknown], [NONE]]
        for group, code in (("", ErrorCode.invalid_group_id), ("unheard-of", ErrorCode.group_id_not_found)):
            answer = await client.send(47, 0, group_id=group, topics=topics)
            assert (answer.error_code, answer.topics) == (code, ())


async def commit(client: WireClient, version: int, topic: Topic, offset: int, partition: int = 0) -> Any:
    row = part(
        8, version, "OffsetCommitRequestPartition",
        partition_index=partition, committed_offset=offset, committed_leader_epoch=-1, committed_metadata=None,
    )  # fmt: skip
    rows = part(8, version, "OffsetCommitRequestTopic", name=topic.name, topic_id=topic.topic_id, partitions=(row,))
    return await client.send(
        8, version, group_id=GROUP, generation_id_or_member_epoch=-1, member_id="", group_instance_id=None,
        retention_time=datetime.timedelta(milliseconds=-1), topics=(rows,),
    )  # fmt: skip


async def fetch(client: WireClient, version: int, topic: Topic) -> list[tuple[int, ErrorCode]]:
    """Return the offsets of partitions 0 and 1."""
    kind = "OffsetFetchRequestTopics" if version >= 8 else "OffsetFetchRequestTopic"
    row = part(9, version, kind, name=topic.name, topic_id=topic.topic_id, partition_indexes=(0, 1))
    group = part(9, version, "OffsetFetchRequestGroup", group_id=GROUP, member_id=None, member_epoch=-1, topics=(row,))
    answer = await client.send(9, version, group_id=GROUP, topics=(row,), groups=(group,), require_stable=True)
    topics = answer.groups[0].topics if version >= 8 else answer.topics
    return [(found.committed_offset, found.error_code) for found in topics[0].partitions]


def deletion(topic: str, *indexes: int) -> Any:
    rows = tuple(part(47, 0, "OffsetDeleteRequestPartition", partition_index=index) for index in indexes)
    return part(47, 0, "OffsetDeleteRequestTopic", name=topic, partitions=rows)


async def test_an_unknown_group_has_no_offsets_and_no_error(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        topic = mini_cluster.broker.metadata.view.find(Topic, topic_key("flights"))
        assert topic is not None
        await find(client, 6)
        for version in versions(9):
            assert await fetch(client, version, topic) == [(-1, NONE), (-1, NONE)]


async def test_group_errors_over_the_wire(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        for version in versions(12):
            answer = await client.send(12, version, group_id=GROUP, generation_id=1, member_id="m", group_instance_id=None)
            assert answer.error_code is ErrorCode.coordinator_not_available, "nobody has asked for a coordinator"
        for version in range(1, HANDLERS[10].max_version + 1):
            answer = await client.send(10, version, key="shares", key_type=2, coordinator_keys=("shares",))
            found = answer.coordinators[0] if version >= 4 else answer
            assert found.error_code is ErrorCode.invalid_request
        await find(client, 6)
        for version in versions(42):
            answer = await client.send(42, version, groups_names=(GROUP,))
            assert [row.error_code for row in answer.results] == [ErrorCode.group_id_not_found]
        for version in versions(13):
            rows = (part(13, version, "MemberIdentity", member_id="m", group_instance_id=None, reason=None),)
            answer = await client.send(13, version, group_id=GROUP, member_id="m", members=rows)
            error = answer.members[0].error_code if version >= 3 else answer.error_code
            assert error is ErrorCode.unknown_member_id
        topic = Topic(name="unknown", topic_id=UUID(int=7), partition_count=1, replication_factor=1)
        for version in versions(8):
            answer = await commit(client, version, topic, offset=1)
            expected = ErrorCode.unknown_topic_id if version >= 10 else ErrorCode.unknown_topic_or_partition
            assert answer.topics[0].partitions[0].error_code is expected


async def test_topics_from_creation_to_deletion(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        for version in versions(19):
            answer = await create(client, f"topic-{version}", version=version, configs={"retention.ms": "1000"})
            assert [(row.name, row.error_code) for row in answer.topics] == [(f"topic-{version}", NONE)]
            if version >= 5:
                configs = {row.name: row.value for row in answer.topics[0].configs}
                assert (answer.topics[0].num_partitions, configs["retention.ms"]) == (2, "1000")
        for count, version in enumerate(versions(37), start=3):
            row = part(37, version, "CreatePartitionsTopic", name="topic-7", count=count, assignments=None)
            answer = await client.send(37, version, topics=(row,), timeout=SECONDS, validate_only=False)
            assert [row.error_code for row in answer.results] == [NONE]
        for version in versions(20):
            topics = (part(20, version, "DeleteTopicState", name=f"topic-{version + 1}", topic_id=None),)
            answer = await client.send(20, version, topic_names=(f"topic-{version + 1}",), topics=topics, timeout=SECONDS)
            assert answer.responses[0].error_code is NONE
        assert mini_cluster.broker.metadata.view.find(Topic, topic_key("topic-7")) is None


async def test_configs_in_every_version(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        for version in versions(33):
            rows = (part(33, version, "AlterableConfig", name="retention.ms", value=str(version)),)
            resource = part(33, version, "AlterConfigsResource", resource_type=2, resource_name="flights", configs=rows)
            answer = await client.send(33, version, resources=(resource,), validate_only=False)
            assert [row.error_code for row in answer.responses] == [NONE]
        for version in versions(44):
            changes = (
                part(44, version, "AlterableConfig", name="segment.bytes", config_operation=0, value="65536"),
                part(44, version, "AlterableConfig", name="retention.ms", config_operation=1, value=None),
            )
            resource = part(44, version, "AlterConfigsResource", resource_type=2, resource_name="flights", configs=changes)
            answer = await client.send(44, version, resources=(resource,), validate_only=False)
            assert [row.error_code for row in answer.responses] == [NONE]
        for version in versions(32):
            found = await described(client, version, 2, "flights")
            assert found["segment.bytes"].value == "65536"
            assert found["retention.ms"].value == "604800000"
            assert (await described(client, version, 4, "1"))["broker.id"].value == "1"


async def test_an_empty_list_of_configs_asks_for_all_of_them(mini_cluster: MiniCluster) -> None:
    """As in Kafka: it is what clients send whose messages have no null by default. They were told of no config at all."""
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        counts = []
        for keys in (None, (), ("segment.bytes",)):
            for version in versions(32):
                row = part(
                    32, version, "DescribeConfigsResource", resource_type=2, resource_name="flights", configuration_keys=keys
                )
                answer = await client.send(32, version, resources=(row,), include_synonyms=False, include_documentation=False)
                counts.append(len(answer.results[0].configs))
        every, empty, one = (set(counts[at : at + len(counts) // 3]) for at in range(0, len(counts), len(counts) // 3))
        assert (empty, one) == (every, {1})
        assert len(every) == 1


async def alter_defaults(client: WireClient, version: int, *changes: tuple[str, int, str | None]) -> Any:
    """Set (0) or delete (1) cluster-wide defaults, and return the row of the response."""
    rows = tuple(
        part(44, version, "AlterableConfig", name=name, config_operation=operation, value=value)
        for name, operation, value in changes
    )
    resource = part(44, version, "AlterConfigsResource", resource_type=4, resource_name="", configs=rows)
    answer = await client.send(44, version, resources=(resource,), validate_only=False)
    return answer.responses[0]


async def test_defaults_of_the_cluster_reach_running_partitions(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        await create(client, "trains", configs={"segment.ms": "900"})
        await until_all_served(mini_cluster)
        partitions = mini_cluster.broker.partitions
        logs = [partitions.find_by_name(name, 0) for name in (b"flights", b"trains")]
        assert all(logs)

        def segment_ms() -> list[int]:
            return [log.configs.segment_ms for log in logs if log is not None]

        for version in versions(44):
            row = await alter_defaults(client, version, ("log.roll.ms", 0, f"70{version}"), ("retention.ms", 0, "5000"))
            assert row.error_code is NONE
            assert segment_ms() == [700 + version, 900]
            assert {name: row.value for name, row in (await described(client, 4, 4, "")).items()} == {
                "log.retention.ms": "5000",
                "log.roll.ms": f"70{version}",
            }
            found = (await described(client, 4, 2, "flights"))["retention.ms"]
            assert (found.value, [one.name for one in found.synonyms]) == ("5000", ["log.retention.ms", "log.retention.ms"])
            assert (await described(client, 4, 4, "1"))["log.roll.ms"].config_source == 3
            row = await alter_defaults(client, version, ("segment.ms", 1, None))
            assert row.error_code is NONE
            assert segment_ms() == [3_600_000, 900]
        for name, value, complaint in (
            ("log.roll.ms", "1", "segment.ms is 1; minimum is 100"),
            ("log.cleaner.threads", "1", "unknown topic config 'log.cleaner.threads'"),
            ("preallocate", "true", "only false is supported"),
        ):
            row = await alter_defaults(client, 1, (name, 0, value))
            assert row.error_code is ErrorCode.invalid_config
            assert complaint in row.error_message
        for version in versions(33):
            rows = (part(33, version, "AlterableConfig", name="log.segment.bytes", value="70000"),)
            resource = part(33, version, "AlterConfigsResource", resource_type=4, resource_name="", configs=rows)
            answer = await client.send(33, version, resources=(resource,), validate_only=False)
            assert answer.responses[0].error_code is NONE
            assert (await described(client, 4, 4, "")).keys() == {"log.segment.bytes"}
            named = part(33, version, "AlterConfigsResource", resource_type=4, resource_name="1", configs=rows)
            answer = await client.send(33, version, resources=(named,), validate_only=False)
            assert "settings of broker 1 are fixed when it starts" in answer.responses[0].error_message


async def described(client: WireClient, version: int, kind: int, name: str) -> dict[str, Any]:
    resource = part(32, version, "DescribeConfigsResource", resource_type=kind, resource_name=name, configuration_keys=None)
    answer = await client.send(32, version, resources=(resource,), include_synonyms=True, include_documentation=True)
    assert answer.results[0].error_code is NONE
    return {row.name: row for row in answer.results[0].configs}


async def test_cluster_and_partitions(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        fields = {"include_cluster_authorized_operations": False, "endpoint_type": 1, "include_fenced_brokers": False}
        for version in versions(60):
            answer = await client.send(60, version, **fields)
            assert (answer.error_code, [row.broker_id for row in answer.brokers], answer.controller_id) == (NONE, [1], 1)
            assert answer.cluster_id
        await create(client, "a", "b", "c")
        pages: list[Any] = []
        cursor: Any = None
        while not pages or cursor is not None:
            wanted = tuple(part(75, 0, "TopicRequest", name=name) for name in ("a", "b", "c", "unknown"))
            start = (
                part(75, 0, "Cursor", topic_name=cursor.topic_name, partition_index=cursor.partition_index) if cursor else None
            )
            answer = await client.send(75, 0, topics=wanted, response_partition_limit=3, cursor=start)
            partitions = [one for row in answer.topics for one in row.partitions]
            assert {(one.eligible_leader_replicas, one.last_known_elr) for one in partitions} <= {((), ())}
            pages.append([(row.name, [one.partition_index for one in row.partitions]) for row in answer.topics])
            cursor = answer.next_cursor
        assert pages == [[("a", [0, 1]), ("b", [0])], [("b", [1]), ("c", [0, 1])], [("unknown", [])]]


async def test_a_cursor_before_the_first_partition_is_refused(mini_cluster: MiniCluster) -> None:
    """As in Kafka. Partitions of negative numbers were described."""
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "a", "b")
        wanted = tuple(part(75, 0, "TopicRequest", name=name) for name in ("a", "b"))
        cursor = part(75, 0, "Cursor", topic_name="a", partition_index=-3)
        answer = await client.send(75, 0, topics=wanted, response_partition_limit=10, cursor=cursor)
        refused = ErrorCode.invalid_request
        assert [(row.name, row.error_code, row.partitions) for row in answer.topics] == [("a", refused, ()), ("b", refused, ())]
        assert answer.next_cursor is None


async def test_a_topic_is_deleted_by_its_name_or_by_its_id_but_not_by_both(mini_cluster: MiniCluster) -> None:
    """As in Kafka. The topic of the name was deleted, whichever had the id."""
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights", "trains")
        trains = mini_cluster.broker.metadata.view.find(Topic, topic_key("trains"))
        assert trains is not None
        topic = part(20, 6, "DeleteTopicState", name="flights", topic_id=trains.topic_id)
        answer = await client.send(20, 6, topics=(topic,), timeout=SECONDS)
        assert answer.responses[0].error_code is ErrorCode.invalid_request
        assert {each.name for each in mini_cluster.broker.metadata.view.all(Topic)} == {"flights", "trains"}


@pytest.mark.parametrize(("offset", "expected"), [(-1, NONE), (0, NONE), (3, ErrorCode.offset_out_of_range)])
async def test_deleting_records(mini_cluster: MiniCluster, offset: int, expected: ErrorCode) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await create(client, "flights")
        await until_all_served(mini_cluster)
        for version in versions(21):
            row = part(21, version, "DeleteRecordsPartition", partition_index=0, offset=offset)
            topic = part(21, version, "DeleteRecordsTopic", name="flights", partitions=(row,))
            answer = await client.send(21, version, topics=(topic,), timeout=SECONDS)
            assert answer.topics[0].partitions[0].error_code is expected
