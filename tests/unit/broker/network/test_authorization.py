"""Authorization by name: denied topics and groups get Kafka's error each, and the request's others are served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import MiniCluster, run_cluster, until_served
from unit.broker.raw_client import RawClient, batch, fetch, fetch_request, produce_request
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.requests.access import Access, AccessRules, Operation, Resource
from stratalog_broker.requests.handler_info import needs_of
from stratalog_broker.requests.permissions import Permissions
from stratalog_broker.requests.principal import ANONYMOUS, Principal
from stratalog_metadata.records import Topic, topic_key

SECONDS = timedelta(seconds=60)
NONE, TOPIC, GROUP = ErrorCode.none, ErrorCode.topic_authorization_failed, ErrorCode.group_authorization_failed
CLUSTER = ErrorCode.cluster_authorization_failed
OPEN_TOPIC, SECRET = "open", "secret"


@dataclass
class Denying:
    """Denies the resources in ``denied``, for any operation or for one; records what it was asked."""

    denied: set[tuple[Resource, str] | tuple[Resource, str, Operation]] = field(default_factory=set)
    asked: list[tuple[Principal, Operation, Resource, str]] = field(default_factory=list)

    def allows(self, principal: Principal, access: Access, name: str) -> bool:
        self.asked.append((principal, *access, name))
        return not self.denied & {(access.resource, name), (access.resource, name, access.operation)}

    def allows_some(self, principal: Principal, access: Access) -> bool:
        return (access.resource, "*") not in self.denied


@dataclass
class Guarded:
    cluster: MiniCluster
    client: WireClient
    rules: Denying
    ids: dict[str, UUID]


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    """Run a cluster with two topics, of which SECRET is denied, and the denied group SECRET."""
    rules = Denying()
    async with (
        run_cluster(tmp_path, rules=AccessRules(authorizer=rules), auto_create_topics=True) as cluster,
        connect(cluster.bootstrap) as client,
    ):
        await create(client, 7, OPEN_TOPIC, SECRET)
        topics = [cluster.broker.metadata.view.find(Topic, topic_key(name)) for name in (OPEN_TOPIC, SECRET)]
        ids = {topic.name: topic.topic_id for topic in topics if topic is not None}
        for topic_id in ids.values():
            await until_served(cluster.broker, topic_id)
        rules.denied = {(Resource.TOPIC, SECRET), (Resource.GROUP, SECRET)}
        rules.asked.clear()
        yield Guarded(cluster, client, rules, ids)


async def create(client: WireClient, version: int, *names: str) -> Any:
    topics = tuple(
        part(19, version, "CreatableTopic", name=name, num_partitions=1, replication_factor=1, assignments=(), configs=())
        for name in names
    )
    return await client.send(19, version, topics=topics, timeout=SECONDS, validate_only=False)


def by_name(rows: Sequence[Any]) -> dict[str, ErrorCode]:
    return {row.name: row.error_code for row in rows}


@pytest.mark.parametrize("version", [3, 9, 13])
async def test_produce_appends_to_the_other_topics(guarded: Guarded, version: int) -> None:
    rows = []
    for name in (SECRET, OPEN_TOPIC):
        data = part(0, version, "PartitionProduceData", index=0, records=batch(b"value"))
        topic = part(0, version, "TopicProduceData", name=name, topic_id=guarded.ids[name], partition_data=(data,))
        rows.append(topic)
    fields = {"transactional_id": None, "acks": -1, "timeout": SECONDS}
    answer = await guarded.client.send(0, version, **fields, topic_data=tuple(rows))
    assert [row.partition_responses[0].error_code for row in answer.responses] == [TOPIC, NONE]
    logs = [guarded.cluster.broker.partitions.find_by_name(name.encode(), 0) for name in (SECRET, OPEN_TOPIC)]
    assert [log.core.next_offset for log in logs if log is not None] == [0, 1]
    assert {one[1:3] for one in guarded.rules.asked} == {(Operation.WRITE, Resource.TOPIC)}
    assert {one[0] for one in guarded.rules.asked} == {ANONYMOUS}


async def test_a_topic_is_asked_for_once_in_a_request(guarded: Guarded) -> None:
    data = tuple(part(0, 9, "PartitionProduceData", index=index, records=batch(b"value")) for index in range(5))
    topic = part(0, 9, "TopicProduceData", name=OPEN_TOPIC, partition_data=data)
    await guarded.client.send(0, 9, transactional_id=None, acks=-1, timeout=SECONDS, topic_data=(topic, topic))
    assert guarded.rules.asked == [(ANONYMOUS, Operation.WRITE, Resource.TOPIC, OPEN_TOPIC)]


async def test_a_denied_batch_without_acknowledgement_closes_the_connection(guarded: Guarded) -> None:
    client = await RawClient.connect(guarded.cluster.bootstrap)
    client.send(0, 9, encode_entity(produce_request(SECRET, 0, batch(b"value"), acks=0)))
    assert await client.closed()
    await client.close()


@pytest.mark.parametrize("version", [4, 11, 13])
async def test_fetch_returns_the_other_topics(guarded: Guarded, version: int) -> None:
    rows = []
    for name in (SECRET, OPEN_TOPIC):
        wanted = part(
            1, version, "FetchPartition", partition=0, current_leader_epoch=-1, fetch_offset=0, partition_max_bytes=1000,
            log_start_offset=-1, last_fetched_epoch=-1,
        )  # fmt: skip
        rows.append(part(1, version, "FetchTopic", topic=name, topic_id=guarded.ids[name], partitions=(wanted,)))
    answer = await guarded.client.send(
        1, version, replica_id=-1, max_wait=timedelta(seconds=60), min_bytes=1, max_bytes=1000, isolation_level=0, session_id=0,
        session_epoch=-1, topics=tuple(rows), forgotten_topics_data=(), rack_id="",
    )  # fmt: skip
    assert [row.partitions[0].error_code for row in answer.responses] == [TOPIC, NONE]
    assert {one[1:] for one in guarded.rules.asked} == {
        (Operation.READ, Resource.TOPIC, SECRET), (Operation.READ, Resource.TOPIC, OPEN_TOPIC),
    }  # fmt: skip


async def test_a_topic_is_checked_at_each_fetch_of_a_session(guarded: Guarded) -> None:
    client = await RawClient.connect(guarded.cluster.bootstrap)
    first = await client.call(1, 11, fetch_request(OPEN_TOPIC, 0, session=(0, 0)))
    assert first.responses[0].partitions[0].error_code is NONE
    guarded.rules.denied.add((Resource.TOPIC, OPEN_TOPIC))
    second = await client.call(1, 11, fetch_request(OPEN_TOPIC, -1, session=(first.session_id, 1), max_wait_ms=10))
    assert second.responses[0].partitions[0].error_code is TOPIC
    assert (await fetch(client, OPEN_TOPIC, 0)).error_code is TOPIC
    await client.close()


async def metadata(guarded: Guarded, version: int, topics: Any) -> dict[str | None, ErrorCode]:
    answer = await guarded.client.send(
        3, version, topics=topics, allow_auto_topic_creation=True, include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )  # fmt: skip
    return {row.name: row.error_code for row in answer.topics}


async def test_metadata_leaves_denied_topics_out_and_refuses_them_by_name(guarded: Guarded) -> None:
    for version in (1, 7, 12):
        assert await metadata(guarded, version, None) == {OPEN_TOPIC: NONE}
        named = [part(3, version, "MetadataRequestTopic", name=name, topic_id=None) for name in (OPEN_TOPIC, SECRET)]
        assert await metadata(guarded, version, tuple(named)) == {OPEN_TOPIC: NONE, SECRET: TOPIC}
    by_id = [part(3, 12, "MetadataRequestTopic", name=None, topic_id=one) for one in (*guarded.ids.values(), UUID(int=9))]
    answer = await guarded.client.send(
        3, 12, topics=tuple(by_id), allow_auto_topic_creation=False, include_topic_authorized_operations=False
    )
    assert [(row.name, row.error_code) for row in answer.topics] == [
        (OPEN_TOPIC, NONE), (None, TOPIC), (None, ErrorCode.unknown_topic_id),
    ]  # fmt: skip


async def test_metadata_creates_no_topic_that_the_client_may_not_create(guarded: Guarded) -> None:
    guarded.rules.denied |= {(Resource.CLUSTER, "kafka-cluster"), (Resource.TOPIC, "closed", Operation.CREATE)}
    names = ("closed", "new")
    wanted = tuple(part(3, 7, "MetadataRequestTopic", name=name) for name in names)
    answer = await metadata(guarded, 7, wanted)
    assert answer["closed"] is TOPIC
    assert answer["new"] is not TOPIC
    view = guarded.cluster.broker.metadata.view
    assert [view.find(Topic, topic_key(name)) is None for name in names] == [True, False]


async def test_describe_topic_partitions(guarded: Guarded) -> None:
    for names, expected in (((), {OPEN_TOPIC: NONE}), ((OPEN_TOPIC, SECRET), {OPEN_TOPIC: NONE, SECRET: TOPIC})):
        wanted = tuple(part(75, 0, "TopicRequest", name=name) for name in names)
        answer = await guarded.client.send(75, 0, topics=wanted, response_partition_limit=100, cursor=None)
        assert by_name(answer.topics) == expected


async def test_create_topics(guarded: Guarded) -> None:
    guarded.rules.denied |= {(Resource.TOPIC, "closed"), (Resource.TOPIC, "opaque", Operation.DESCRIBE_CONFIGS)}
    assert by_name((await create(guarded.client, 7, "closed")).topics) == {"closed": NONE}, "it may create any topic"
    guarded.rules.denied |= {(Resource.CLUSTER, "kafka-cluster"), (Resource.TOPIC, "barred")}
    answer = await create(guarded.client, 7, "barred", "opaque", "twice", "twice")
    assert by_name(answer.topics) == {"barred": TOPIC, "opaque": NONE, "twice": ErrorCode.invalid_request}
    (opaque,) = (row for row in answer.topics if row.name == "opaque")
    assert (opaque.topic_config_error_code, opaque.num_partitions) == (TOPIC, -1)
    assert guarded.cluster.broker.metadata.view.find(Topic, topic_key("barred")) is None


async def test_delete_topics(guarded: Guarded) -> None:
    secret = guarded.ids[SECRET]
    for version, named, topic_id, shown in ((5, SECRET, None, SECRET), (6, SECRET, None, SECRET), (6, None, secret, None)):
        topic = part(20, version, "DeleteTopicState", name=named, topic_id=topic_id)
        answer = await guarded.client.send(20, version, topics=(topic,), topic_names=(named,), timeout=SECONDS)
        assert by_name(answer.responses) == {shown: TOPIC}
    topics = tuple(part(20, 6, "DeleteTopicState", name=name, topic_id=None) for name in (SECRET, OPEN_TOPIC))
    answer = await guarded.client.send(20, 6, topics=topics, timeout=SECONDS)
    assert by_name(answer.responses) == {SECRET: TOPIC, OPEN_TOPIC: NONE}


async def test_list_offsets_and_leader_epochs_and_deleted_records(guarded: Guarded) -> None:
    send = guarded.client.send
    names = (SECRET, OPEN_TOPIC)
    one = part(2, 7, "ListOffsetsPartition", partition_index=0, current_leader_epoch=-1, timestamp=-1)
    topics = tuple(part(2, 7, "ListOffsetsTopic", name=name, partitions=(one,)) for name in names)
    answer = await send(2, 7, replica_id=-1, isolation_level=0, topics=topics)
    rows = [row.partitions[0] for row in answer.topics]
    assert [(row.error_code, row.offset) for row in rows] == [(TOPIC, -1), (NONE, 0)]

    epoch = part(23, 4, "OffsetForLeaderPartition", partition=0, current_leader_epoch=-1, leader_epoch=0)
    wanted = tuple(part(23, 4, "OffsetForLeaderTopic", topic=name, partitions=(epoch,)) for name in names)
    answer = await send(23, 4, replica_id=-1, topics=wanted)
    assert [row.partitions[0].error_code for row in answer.topics] == [TOPIC, NONE]

    record = part(21, 2, "DeleteRecordsPartition", partition_index=0, offset=0)
    wanted = tuple(part(21, 2, "DeleteRecordsTopic", name=name, partitions=(record,)) for name in names)
    answer = await send(21, 2, topics=wanted, timeout=SECONDS)
    assert [(row.partitions[0].error_code, row.partitions[0].low_watermark) for row in answer.topics] == [
        (TOPIC, -1),
        (NONE, 0),
    ]


async def test_partitions_and_configs(guarded: Guarded) -> None:
    send = guarded.client.send
    names = (SECRET, OPEN_TOPIC)
    wanted = tuple(part(37, 3, "CreatePartitionsTopic", name=name, count=2, assignments=None) for name in names)
    answer = await send(37, 3, topics=wanted, timeout=SECONDS, validate_only=False)
    assert by_name(answer.results) == {SECRET: TOPIC, OPEN_TOPIC: NONE}

    guarded.rules.denied.add((Resource.CLUSTER, "kafka-cluster"))
    resources = ((2, SECRET), (2, OPEN_TOPIC), (4, "1"), (32, SECRET))
    expected = [TOPIC, NONE, CLUSTER, GROUP]
    described = tuple(
        part(32, 4, "DescribeConfigsResource", resource_type=kind, resource_name=name, configuration_keys=None)
        for kind, name in resources
    )
    answer = await send(32, 4, resources=described, include_synonyms=False, include_documentation=False)
    assert [row.error_code for row in answer.results] == expected
    assert [bool(row.configs) for row in answer.results] == [False, True, False, False]
    assert (await send(74, 1, resource_types=())).error_code is CLUSTER
    for key, version in ((33, 2), (44, 1)):
        config = part(key, version, "AlterableConfig", name="retention.ms", config_operation=0, value="1000")
        altered = tuple(
            part(key, version, "AlterConfigsResource", resource_type=kind, resource_name=name, configs=(config,))
            for kind, name in resources
        )
        answer = await send(key, version, resources=altered, validate_only=False)
        assert [row.error_code for row in answer.responses] == expected


async def committed(guarded: Guarded, group: str) -> list[ErrorCode]:
    row = part(
        8, 9, "OffsetCommitRequestPartition",
        partition_index=0, committed_offset=3, committed_leader_epoch=-1, committed_metadata=None,
    )  # fmt: skip
    topics = tuple(part(8, 9, "OffsetCommitRequestTopic", name=name, partitions=(row,)) for name in (SECRET, OPEN_TOPIC))
    answer = await guarded.client.send(
        8, 9, group_id=group, generation_id_or_member_epoch=-1, member_id="", group_instance_id=None, topics=topics
    )
    return [topic.partitions[0].error_code for topic in answer.topics]


async def test_offsets_of_groups(guarded: Guarded) -> None:
    send = guarded.client.send
    answer = await send(10, 6, key_type=0, coordinator_keys=(SECRET, "group"))
    assert [row.error_code for row in answer.coordinators] == [GROUP, NONE]
    assert (await send(10, 3, key=SECRET, key_type=0)).error_code is GROUP
    while (await send(16, 5, states_filter=(), types_filter=())).error_code is ErrorCode.coordinator_load_in_progress:
        pass
    assert await committed(guarded, SECRET) == [GROUP, GROUP]
    guarded.rules.denied.discard((Resource.TOPIC, SECRET))
    assert await committed(guarded, "group") == [NONE, NONE]
    guarded.rules.denied.add((Resource.TOPIC, SECRET))
    assert await committed(guarded, "group") == [TOPIC, NONE]

    topics = tuple(part(9, 8, "OffsetFetchRequestTopics", name=name, partition_indexes=(0,)) for name in (SECRET, OPEN_TOPIC))
    for wanted, expected in ((topics, {SECRET: (TOPIC, -1), OPEN_TOPIC: (NONE, 3)}), (None, {OPEN_TOPIC: (NONE, 3)})):
        groups = tuple(part(9, 8, "OffsetFetchRequestGroup", group_id=group, topics=wanted) for group in (SECRET, "group"))
        answer = await send(9, 8, groups=groups, require_stable=False)
        denied, found = answer.groups
        assert (denied.error_code, denied.topics, found.error_code) == (GROUP, (), NONE)
        rows = {row.name: (row.partitions[0].error_code, row.partitions[0].committed_offset) for row in found.topics}
        assert rows == expected
    deleted = part(47, 0, "OffsetDeleteRequestPartition", partition_index=0)
    deletions = tuple(
        part(47, 0, "OffsetDeleteRequestTopic", name=name, partitions=(deleted,)) for name in (SECRET, OPEN_TOPIC)
    )
    answer = await send(47, 0, group_id="group", topics=deletions)
    assert [row.partitions[0].error_code for row in answer.topics] == [TOPIC, NONE]
    assert (await send(47, 0, group_id=SECRET, topics=deletions)).error_code is GROUP


async def test_members_of_groups(guarded: Guarded) -> None:
    send = guarded.client.send
    member: dict[str, Any] = {"group_id": SECRET, "generation_id": 1, "member_id": "m", "group_instance_id": None}
    protocol = part(11, 9, "JoinGroupRequestProtocol", name="range", metadata=b"")
    times = {"session_timeout": SECONDS, "rebalance_timeout": SECONDS}
    joining = {"protocol_type": "consumer", "protocols": (protocol,), "reason": None}
    joined = await send(11, 9, **member, **times, **joining)
    assert (joined.error_code, joined.member_id) == (GROUP, ""), "as Kafka: a denied member has no id"
    syncing = {"protocol_type": "consumer", "protocol_name": "range", "assignments": ()}
    assert (await send(14, 5, **member, **syncing)).error_code is GROUP
    assert (await send(12, 4, **member)).error_code is GROUP
    leaving = part(13, 5, "MemberIdentity", member_id="m", group_instance_id=None, reason=None)
    assert (await send(13, 5, group_id=SECRET, members=(leaving,))).error_code is GROUP


async def test_groups_described_listed_and_deleted(guarded: Guarded) -> None:
    send = guarded.client.send
    guarded.rules.denied.clear()
    await send(10, 6, key_type=0, coordinator_keys=(SECRET, "group"))
    while (await send(16, 5, states_filter=(), types_filter=())).error_code is ErrorCode.coordinator_load_in_progress:
        pass
    for group in (SECRET, "group"):
        assert await committed(guarded, group) == [NONE, NONE]
    guarded.rules.denied = {(Resource.GROUP, SECRET)}
    listed = await send(16, 5, states_filter=(), types_filter=())
    assert {row.group_id for row in listed.groups} == {SECRET, "group"}, "it may describe the cluster"
    guarded.rules.denied.add((Resource.CLUSTER, "kafka-cluster"))
    listed = await send(16, 5, states_filter=(), types_filter=())
    assert (listed.error_code, [row.group_id for row in listed.groups]) == (NONE, ["group"])
    answer = await send(15, 6, groups=(SECRET, "group"), include_authorized_operations=False)
    assert [row.error_code for row in answer.groups] == [GROUP, NONE]
    answer = await send(42, 2, groups_names=(SECRET, "group"))
    assert [row.error_code for row in answer.results] == [GROUP, NONE]


async def test_producer_ids_need_the_cluster_or_any_topic(guarded: Guarded) -> None:
    async def code() -> ErrorCode:
        answer = await guarded.client.send(
            22, 4, transactional_id=None, transaction_timeout=SECONDS, producer_id=-1, producer_epoch=-1
        )
        found: ErrorCode = answer.error_code
        return found

    guarded.rules.denied.add((Resource.TOPIC, "*"))
    assert await code() is NONE
    guarded.rules.denied.add((Resource.CLUSTER, "kafka-cluster"))
    assert await code() is CLUSTER
    guarded.rules.denied.discard((Resource.TOPIC, "*"))
    assert await code() is NONE


@pytest.mark.parametrize("allowed", [Operation.ALTER, Operation.CLUSTER_ACTION, None])
async def test_markers_need_one_of_two_operations_on_the_cluster(guarded: Guarded, allowed: Operation | None) -> None:
    two = {Operation.ALTER, Operation.CLUSTER_ACTION}
    guarded.rules.denied |= {(Resource.CLUSTER, "kafka-cluster", operation) for operation in two - {allowed}}
    topic = part(27, 1, "WritableTxnMarkerTopic", name=OPEN_TOPIC, partition_indexes=(0,))
    fields = {"producer_id": 5, "producer_epoch": 0, "coordinator_epoch": 0, "transaction_result": False}
    marker = part(27, 1, "WritableTxnMarker", **fields, topics=(topic,))
    answer = await guarded.client.send(27, 1, markers=(marker,))
    (row,) = answer.markers[0].topics[0].partitions
    assert row.error_code is (CLUSTER if allowed is None else NONE)


def test_every_api_asks_for_permissions() -> None:
    """ApiVersions is open to everybody, and so is telemetry, as in Kafka."""
    handlers = {info.name: info.handle or info.handle_raw for info in HANDLERS.values()}
    without = {name for name, handle in handlers.items() if handle and Permissions not in needs_of(handle).values()}
    assert without == {"ApiVersions", "GetTelemetrySubscriptions", "PushTelemetry"}
