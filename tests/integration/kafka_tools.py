"""The runs of each command-line tool of Apache Kafka's distribution against a cluster, with their expected results.

``python -m integration.kafka_tools > docs/reference/kafka-tools.md`` makes the page; ``test_kafka_tools.py`` runs the tools.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from stratalog_loadgen.java_tools import KAFKA_VERSION

TOOLS = "org.apache.kafka.tools."


class Result(Enum):
    """The expected result of a tool."""

    WORKS = "works"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One run. ``{bootstrap}``, ``{topic}``, ``{group}`` and ``{dir}`` are replaced by the cluster's and the test's own.

    ``prints`` is the expected output: a regular expression if the tool works, a text for people if it is refused. A tool that
    ``is_endless`` is killed once it has printed that. A step that ``is_late`` shows an earlier effect, which comes after it
    or of which another broker hears later: it runs until it prints what is expected. ``main_class``: that of another tool,
    which shows the result of this one.
    """

    arguments: str
    prints: str
    what: str
    result: Result = Result.WORKS
    exit_code: int = 0
    stdin: str = ""
    is_endless: bool = False
    is_late: bool = False
    main_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One script of the distribution's ``bin`` directory, or a class without one. Its steps run in order on one topic."""

    script: str
    main_class: str
    steps: tuple[Step, ...]


def _refused(what: str, arguments: str, prints: str, exit_code: int = 1) -> Step:
    return Step(arguments=arguments, prints=prints, what=what, result=Result.REFUSED, exit_code=exit_code)


def _lacks(what: str, arguments: str, api: str, exit_code: int = 1) -> Step:
    """A step that is refused because the cluster does not serve an API, which clients know from ApiVersions."""
    return _refused(what, arguments, f"The node does not support {api}", exit_code)


_AT = "--bootstrap-server {bootstrap}"
_OF_GROUPS = f"{_AT} --timeout 120000"
_FILES = {
    "delete.json": '{{"partitions": [{{"topic": "{topic}", "partition": 0, "offset": 1}}], "version": 1}}',
    "topics.json": '{{"topics": [{{"topic": "{topic}"}}], "version": 1}}',
    "move.json": '{{"partitions": [{{"topic": "{topic}", "partition": 0, "replicas": [2, 1]}}], "version": 1}}',
    "empty.properties": "",
}
"""Files under ``{dir}`` that the steps use."""
FILES = _FILES

KAFKA_TOOLS: tuple[Tool, ...] = (
    Tool(
        script="kafka-topics.sh",
        main_class=TOOLS + "TopicCommand",
        steps=(
            Step(
                what="create a topic",
                arguments=f"{_AT} --create --topic {{topic}}-new --partitions 2 --replication-factor 3"
                " --config retention.ms=86400000",
                prints="Created topic",
            ),
            Step(
                what="describe it",
                is_late=True,
                arguments=f"{_AT} --describe --topic {{topic}}-new",
                prints=r"PartitionCount: 2.*retention\.ms=86400000[\s\S]*Partition: 1\s+Leader: \d",
            ),
            Step(what="add partitions", arguments=f"{_AT} --alter --topic {{topic}}-new --partitions 3", prints=""),
            Step(what="list topics", arguments=f"{_AT} --list", prints="{topic}-new", is_late=True),
            Step(
                what="look for under-replicated partitions",
                arguments=f"{_AT} --describe --under-replicated-partitions --topic {{topic}}",
                prints=r"\A\s*\Z",
            ),
            Step(what="delete it", arguments=f"{_AT} --delete --topic {{topic}}-new", prints=""),
            Step(
                what="create a compacted topic",
                arguments=f"{_AT} --create --topic {{topic}}-compacted --config cleanup.policy=compact",
                prints="Created topic {topic}-compacted",
            ),
        ),
    ),
    Tool(
        script="kafka-console-producer.sh",
        main_class=TOOLS + "ConsoleProducer",
        steps=(
            Step(
                what="write keyed records",
                arguments=f"{_AT} --topic {{topic}} --reader-property parse.key=true --reader-property key.separator=:",
                stdin="a:one\nb:two\n",
                prints="",
            ),
        ),
    ),
    Tool(
        script="kafka-console-consumer.sh",
        main_class=TOOLS + "consumer.ConsoleConsumer",
        steps=(
            Step(
                what="read from the beginning in a group",
                arguments=f"{_AT} --topic {{topic}} --from-beginning --max-messages 3 --group {{group}}",
                prints="Processed a total of 3 messages",
            ),
            Step(
                what="read in a group of the consumer protocol",
                arguments=f"{_AT} --topic {{topic}} --from-beginning --max-messages 3 --group {{group}}-848"
                " --command-property group.protocol=consumer",
                prints="Processed a total of 3 messages",
            ),
            Step(
                what="read committed offsets from __consumer_offsets",
                arguments=f"{_AT} --topic __consumer_offsets --from-beginning"
                " --formatter org.apache.kafka.tools.consumer.OffsetsMessageFormatter",
                prints=r'"group":"[^"]+"',
                exit_code=-9,
                is_endless=True,
            ),
        ),
    ),
    Tool(
        script="kafka-consumer-groups.sh",
        main_class=TOOLS + "consumer.group.ConsumerGroupCommand",
        steps=(
            Step(
                what="set offsets",
                arguments=f"{_OF_GROUPS} --group {{group}} --reset-offsets --to-earliest --topic {{topic}} --execute",
                prints=r"{group}\s+{topic}\s+0\s+0",
            ),
            Step(what="list groups", arguments=f"{_OF_GROUPS} --list", prints="{group}"),
            Step(
                what="describe offsets and lag",
                arguments=f"{_OF_GROUPS} --describe --group {{group}}",
                prints=r"{group}\s+{topic}\s+0\s+0\s+3\s+3\s",
            ),
            Step(
                what="describe its state",
                arguments=f"{_OF_GROUPS} --describe --group {{group}} --state",
                prints=r"{group}.*Empty\s+0",
            ),
            Step(
                what="describe its members",
                arguments=f"{_OF_GROUPS} --describe --group {{group}} --members",
                prints="has no active members",
            ),
            Step(
                what="delete offsets",
                arguments=f"{_OF_GROUPS} --group {{group}} --delete-offsets --topic {{topic}}",
                prints=r"{topic}\s+0\s+Successful",
            ),
            Step(
                what="set offsets to the end",
                arguments=f"{_OF_GROUPS} --group {{group}} --reset-offsets --to-latest --topic {{topic}} --execute",
                prints=r"{group}\s+{topic}\s+0\s+3",
            ),
            Step(
                what="delete the group",
                arguments=f"{_OF_GROUPS} --group {{group}} --delete",
                prints="Deletion of requested consumer groups .* was successful",
            ),
        ),
    ),
    Tool(
        script="kafka-get-offsets.sh",
        main_class=TOOLS + "GetOffsetShell",
        steps=(
            Step(what="latest offsets", arguments=f"{_AT} --topic {{topic}}", prints="{topic}:0:3"),
            Step(what="earliest offsets", arguments=f"{_AT} --topic {{topic}} --time earliest", prints="{topic}:0:0"),
        ),
    ),
    Tool(
        script="kafka-delete-records.sh",
        main_class=TOOLS + "DeleteRecordsCommand",
        steps=(
            Step(
                what="move the start of a partition",
                arguments=f"{_AT} --offset-json-file {{dir}}/delete.json",
                prints=r"partition: {topic}-0\s+low_watermark: 1",
            ),
        ),
    ),
    Tool(
        script="kafka-configs.sh",
        main_class="kafka.admin.ConfigCommand",
        steps=(
            Step(
                what="change a topic's configs",
                arguments=f"{_AT} --alter --entity-type topics --entity-name {{topic}} --add-config"
                " segment.bytes=1000000,remote.log.copy.disable=true,local.retention.ms=1000,local.retention.bytes=5000",
                prints="Completed updating config for topic {topic}",
            ),
            Step(
                what="describe a topic's configs",
                is_late=True,
                arguments=f"{_AT} --describe --entity-type topics --entity-name {{topic}}",
                prints=r"(?=[\s\S]*remote\.log\.copy\.disable=true )(?=[\s\S]*local\.retention\.ms=1000 )"
                r"(?=[\s\S]*local\.retention\.bytes=5000 )[\s\S]*segment\.bytes=1000000.*"
                r"DYNAMIC_TOPIC_CONFIG:segment\.bytes=1000000, DEFAULT_CONFIG:log\.segment",
            ),
            Step(
                what="set a default for all topics",
                arguments=f"{_AT} --alter --entity-type brokers --entity-default --add-config log.roll.jitter.ms=1234",
                prints="Completed updating default config for brokers",
            ),
            Step(
                what="describe the defaults",
                is_late=True,
                arguments=f"{_AT} --describe --entity-type brokers --entity-default",
                prints=r"log\.roll\.jitter\.ms=1234.*DYNAMIC_DEFAULT_BROKER_CONFIG:log\.roll\.jitter\.ms=1234",
            ),
            Step(
                what="describe a broker",
                is_late=True,
                arguments=f"{_AT} --describe --entity-type brokers --entity-name 1 --all",
                prints=r"broker\.id=1 [\s\S]*log\.roll\.jitter\.ms=1234 [\s\S]*num\.partitions=\d+ ",
            ),
            Step(
                what="delete the default",
                arguments=f"{_AT} --alter --entity-type brokers --entity-default --delete-config log.roll.jitter.ms",
                prints="Completed updating default config for brokers",
            ),
            _refused(
                "change a setting of one broker",
                f"{_AT} --alter --entity-type brokers --entity-name 1 --add-config num.io.threads=9",
                "settings of broker 1 are fixed when it starts",
            ),
            Step(
                what="let brokers compress a topic",
                arguments=f"{_AT} --alter --entity-type topics --entity-name {{topic}} --add-config compression.type=zstd",
                prints="Completed updating config for topic",
            ),
            _refused(
                "preallocate files",
                f"{_AT} --alter --entity-type topics --entity-name {{topic}} --add-config preallocate=true",
                "preallocate is true; only false is supported",
            ),
            Step(
                what="change a group's configs",
                arguments=f"{_AT} --alter --entity-type groups --entity-name {{group}}"
                " --add-config consumer.session.timeout.ms=50000",
                prints="Completed updating config for group",
            ),
            Step(
                what="describe all groups' configs",
                is_late=True,
                arguments=f"{_AT} --describe --entity-type groups",
                prints=r"{group} are:\s+consumer\.session\.timeout\.ms=50000",
            ),
            _lacks("describe users", f"{_AT} --describe --entity-type users", "DESCRIBE_CLIENT_QUOTAS"),
        ),
    ),
    Tool(
        script="kafka-broker-api-versions.sh",
        main_class=TOOLS + "BrokerApiVersionsCommand",
        steps=(Step(what="list APIs", arguments=_AT, prints=r"DescribeTopicPartitions\(75\): 0 \[usable: 0\]"),),
    ),
    Tool(
        script="kafka-cluster.sh",
        main_class=TOOLS + "ClusterTool",
        steps=(
            Step(what="show the cluster's id", arguments=f"cluster-id {_AT}", prints=r"Cluster ID: \S{{22}}"),
            Step(what="list brokers", arguments=f"list-endpoints {_AT}", prints=r"1\s+127\.0\.0\.1[\s\S]*2\s+127\.0\.0\.1"),
            _refused("unregister a broker that is not registered", f"unregister {_AT} --id 9", "broker 9 is not registered"),
        ),
    ),
    Tool(
        script="kafka-features.sh",
        main_class=TOOLS + "FeatureCommand",
        steps=(
            Step(
                what="describe features",
                arguments=f"{_AT} describe",
                prints=r"transaction\.version\s+SupportedMinVersion: 0\s+SupportedMaxVersion: 2\s+FinalizedVersionLevel: 2",
            ),
            Step(
                what="downgrade transactions",
                arguments=f"{_AT} downgrade --feature transaction.version=1",
                prints=r"transaction\.version was downgraded to 1\.",
            ),
            Step(
                what="upgrade transactions",
                arguments=f"{_AT} upgrade --feature transaction.version=2",
                prints=r"transaction\.version was upgraded to 2\.",
            ),
            _refused(
                "upgrade to an unknown level",
                f"{_AT} upgrade --feature transaction.version=3",
                "this version of Stratalog only supports levels 0-2",
            ),
            _refused("upgrade an unknown feature", f"{_AT} upgrade --feature share.version=1", "this feature is not supported"),
        ),
    ),
    Tool(
        script="kafka-groups.sh",
        main_class=TOOLS + "GroupsCommand",
        steps=(Step(what="list groups of all types", arguments=f"{_AT} --list", prints=r"GROUP\s+TYPE\s+PROTOCOL"),),
    ),
    Tool(
        script="kafka-producer-perf-test.sh",
        main_class=TOOLS + "ProducerPerformance",
        steps=(
            Step(
                what="write 1,000 records",
                arguments=f"{_AT} --topic {{topic}} --num-records 1000 --record-size 100 --throughput -1",
                prints="1000 records sent",
            ),
        ),
    ),
    Tool(
        script="kafka-consumer-perf-test.sh",
        main_class=TOOLS + "ConsumerPerformance",
        steps=(
            Step(
                what="read 3 records",
                arguments=f"{_AT} --topic {{topic}} --num-records 3 --hide-header --timeout 120000",
                prints=r", 3, ",
            ),
        ),
    ),
    Tool(
        script="kafka-e2e-latency.sh",
        main_class=TOOLS + "EndToEndLatency",
        steps=(
            Step(
                what="send and receive 3 records",
                arguments=f"{_AT} --topic {{topic}} --num-records 3 --producer-acks all --record-size 10",
                prints="Percentiles: 50th",
            ),
        ),
    ),
    Tool(
        script="kafka-verifiable-producer.sh",
        main_class=TOOLS + "VerifiableProducer",
        steps=(
            Step(what="write 3 records", arguments=f"{_AT} --topic {{topic}} --max-messages 3", prints='"sent":3,"acked":3'),
        ),
    ),
    Tool(
        script="kafka-verifiable-consumer.sh",
        main_class=TOOLS + "VerifiableConsumer",
        steps=(
            Step(
                what="read 3 records and commit",
                arguments=f"{_AT} --topic {{topic}} --group-id {{group}} --max-messages 3 --reset-policy earliest",
                prints=r'offsets_committed[\s\S]*"success":true',
            ),
        ),
    ),
    Tool(
        script="kafka-streams-application-reset.sh",
        main_class=TOOLS + "StreamsResetter",
        steps=(
            Step(
                what="reset offsets of an application's input",
                arguments=f"{_AT} --application-id {{group}} --input-topics {{topic}}",
                prints="Topic: {topic} Partition: 0 Offset: 0",
            ),
        ),
    ),
    Tool(
        script="kafka-replica-verification.sh",
        main_class=TOOLS + "ReplicaVerificationTool",
        steps=(
            Step(
                what="compare replicas",
                arguments="--broker-list {bootstrap} --topics-include {topic} --report-interval-ms 500",
                prints="max lag is 0 for partition {topic}-0",
                exit_code=-9,
                is_endless=True,
            ),
        ),
    ),
    Tool(
        script="ClientCompatibilityTest",
        main_class=TOOLS + "ClientCompatibilityTest",
        steps=(
            Step(
                what="what Kafka's system tests ask of a broker",
                arguments=f"{_AT} --topic {{topic}}-compatible --offsets-for-times-supported true --cluster-id-supported true"
                " --expect-record-too-large-exception false --num-cluster-nodes 2 --create-topics-supported true"
                " --describe-acls-supported false --describe-configs-supported true --idempotent-producer-supported true",
                prints="SUCCESS",
            ),
        ),
    ),
    Tool(
        script="kafka-log-dirs.sh",
        main_class=TOOLS + "LogDirsCommand",
        steps=(
            Step(
                what="describe the bytes of a topic in each tier",
                arguments=f"{_AT} --describe --topic-list {{topic}}",
                prints=r'"partition":"{topic}-0"[^}}]*"size":[1-9]',
            ),
        ),
    ),
    Tool(
        script="kafka-metadata-quorum.sh",
        main_class=TOOLS + "MetadataQuorumCommand",
        steps=(
            Step(
                what="describe the metadata quorum",
                arguments=f"{_AT} describe --status",
                prints=r"LeaderId:\s+[123]\s[\s\S]*MaxFollowerLag:\s+\d[\s\S]*CurrentVoters:[\s\S]*CurrentObservers:\s+\[\]",
            ),
            Step(
                what="describe the lag of its nodes",
                arguments=f"{_AT} describe --replication",
                prints=r"NodeId[\s\S]*Leader[\s\S]*Follower[\s\S]*Follower",
            ),
        ),
    ),
    Tool(
        script="kafka-leader-election.sh",
        main_class=TOOLS + "LeaderElectionCommand",
        steps=(
            Step(
                what="elect the preferred leader, which leads already",
                arguments=f"{_AT} --election-type preferred --topic {{topic}} --partition 0",
                prints=r"Valid replica already elected for partitions {topic}-0",
            ),
            Step(
                what="elect all preferred leaders",
                arguments=f"{_AT} --election-type preferred --all-topic-partitions",
                prints="",
            ),
            Step(
                what="elect an unclean leader: never needed",
                arguments=f"{_AT} --election-type unclean --topic {{topic}} --partition 0",
                prints=r"Valid replica already elected for partitions {topic}-0",
            ),
        ),
    ),
    Tool(
        script="kafka-reassign-partitions.sh",
        main_class=TOOLS + "reassign.ReassignPartitionsCommand",
        steps=(
            Step(
                what="list reassignments: there are none", arguments=f"{_AT} --list", prints="No partition reassignments found"
            ),
            Step(
                what="plan a reassignment",
                arguments=f"{_AT} --generate --topics-to-move-json-file {{dir}}/topics.json --broker-list 1,2",
                prints=r"Proposed partition reassignment configuration",
            ),
            Step(
                what="reassign",
                arguments=f"{_AT} --execute --reassignment-json-file {{dir}}/move.json",
                prints="Successfully started partition reassignment for {topic}-0",
            ),
            Step(
                what="verify the reassignment",
                is_late=True,
                arguments=f"{_AT} --verify --reassignment-json-file {{dir}}/move.json",
                prints=r"Reassignment of partition {topic}-0 is completed",
            ),
            Step(
                what="cancel it: it is over",
                arguments=f"{_AT} --cancel --reassignment-json-file {{dir}}/move.json",
                prints=r"None of the specified partition reassignments are active",
            ),
        ),
    ),
    Tool(
        script="kafka-acls.sh",
        main_class=TOOLS + "AclCommand",
        steps=(
            _lacks("list ACLs", f"{_AT} --list", "DESCRIBE_ACLS"),
            _lacks("add an ACL", f"{_AT} --add --allow-principal User:any --topic {{topic}} --operation Read", "DESCRIBE_ACLS"),
            _lacks("remove ACLs", f"{_AT} --remove --force --topic {{topic}}", "DELETE_ACLS"),
        ),
    ),
    Tool(
        script="kafka-delegation-tokens.sh",
        main_class=TOOLS + "DelegationTokenCommand",
        steps=(
            _lacks(
                "describe tokens", f"{_AT} --describe --command-config {{dir}}/empty.properties", "DESCRIBE_DELEGATION_TOKEN"
            ),
        ),
    ),
    Tool(
        script="kafka-client-metrics.sh",
        main_class=TOOLS + "ClientMetricsCommand",
        steps=(
            Step(
                what="subscribe to metrics of clients",
                arguments=f"{_AT} --alter --name {{group}} --metrics org.apache.kafka.producer. --interval 60000"
                " --match client_software_name=nobody",
                prints="Altered client metrics config for {group}",
            ),
            Step(what="list subscriptions", arguments=f"{_AT} --list", prints="{group}", is_late=True),
            Step(
                what="describe a subscription",
                is_late=True,
                arguments=f"{_AT} --describe --name {{group}}",
                prints=r"interval\.ms=60000\s+match=client_software_name=nobody\s+metrics=org\.apache\.kafka\.producer\.",
            ),
            Step(
                what="delete a subscription",
                arguments=f"{_AT} --delete --name {{group}}",
                prints="Deleted client metrics config",
            ),
        ),
    ),
    Tool(
        script="kafka-transactions.sh",
        main_class=TOOLS + "TransactionsCommand",
        steps=(
            Step(what="list transactions", arguments=f"{_AT} list", prints=r"TransactionalId\s+Coordinator\s+ProducerId"),
            Step(
                what="describe the producers of a partition",
                arguments=f"{_AT} describe-producers --topic {{topic}} --partition 0",
                prints=r"ProducerId\s+ProducerEpoch\s+LatestCoordinatorEpoch",
            ),
            Step(
                what="find hanging transactions of a topic",
                arguments=f"{_AT} find-hanging --topic {{topic}}",
                prints=r"Topic\s+Partition\s+ProducerId",
            ),
        ),
    ),
    Tool(
        script="TransactionalMessageCopier",
        main_class=TOOLS + "TransactionalMessageCopier",
        steps=(
            Step(
                what="copy in transactions",
                arguments="--broker-list {bootstrap} --input-topic {topic} --input-partition 0 --output-topic {topic}-copy"
                " --transactional-id {group} --consumer-group {group} --max-messages 3 --transaction-size 1",
                prints='"consumed":3',
            ),
            Step(
                what="each of its transactions has an epoch (`transaction.version` 2)",
                is_late=True,
                arguments=f"{_AT} describe-producers --topic {{topic}}-copy --partition 0",
                prints=r"ProducerEpoch[^\n]*\n\d+\s+3\s",
                main_class=TOOLS + "TransactionsCommand",
            ),
        ),
    ),
    Tool(
        script="LogCompactionTester",
        main_class=TOOLS + "LogCompactionTester",
        steps=(
            Step(
                what="test compaction",
                arguments=f"{_AT} --messages 10000 --duplicates 10 --topics 1 --percent-deletes 10 --sleep 1",
                prints="0 mismatches",
            ),
        ),
    ),
    Tool(
        script="kafka-share-groups.sh",
        main_class=TOOLS + "consumer.group.ShareGroupCommand",
        steps=(
            Step(what="list share groups: there are none", arguments=f"{_OF_GROUPS} --list", prints=r"\A\s*\Z"),
            _lacks("describe a share group", f"{_OF_GROUPS} --describe --group {{group}}", "SHARE_GROUP_DESCRIBE", exit_code=0),
        ),
    ),
    Tool(
        script="kafka-console-share-consumer.sh",
        main_class=TOOLS + "consumer.ConsoleShareConsumer",
        steps=(
            _lacks(
                "read in a share group",
                f"{_AT} --topic {{topic}} --max-messages 1 --timeout-ms 30000",
                "SHARE_GROUP_HEARTBEAT",
                exit_code=0,
            ),
        ),
    ),
    Tool(
        script="kafka-share-consumer-perf-test.sh",
        main_class=TOOLS + "ShareConsumerPerformance",
        steps=(
            _lacks(
                "read in a share group", f"{_AT} --topic {{topic}} --num-records 1 --timeout 120000", "SHARE_GROUP_HEARTBEAT"
            ),
        ),
    ),
    Tool(
        script="kafka-verifiable-share-consumer.sh",
        main_class=TOOLS + "VerifiableShareConsumer",
        steps=(
            _lacks(
                "read in a share group",
                f"{_AT} --topic {{topic}} --group-id {{group}} --max-messages 1",
                "SHARE_GROUP_HEARTBEAT",
                exit_code=0,
            ),
        ),
    ),
    Tool(
        script="kafka-streams-groups.sh",
        main_class=TOOLS + "streams.StreamsGroupCommand",
        steps=(
            Step(what="list streams groups: there are none", arguments=f"{_OF_GROUPS} --list", prints=r"\A\s*\Z"),
            _lacks("describe a streams group", f"{_OF_GROUPS} --describe --group {{group}}", "STREAMS_GROUP_DESCRIBE"),
        ),
    ),
)

NOT_FOR_CLUSTERS = {
    TOOLS + "ConnectPluginPath": ("connect-plugin-path.sh", "reads directories of Connect plugins"),
    TOOLS + "DumpLogSegments": ("kafka-dump-log.sh", "reads files of a Kafka broker; see `stratalog ledger read`"),
    TOOLS + "JmxTool": ("kafka-jmx.sh", "asks a Java process over JMX"),
    TOOLS + "OAuthCompatibilityTool": ("OAuthCompatibilityTool", "asks an OAuth provider"),
    "kafka.tools.StorageTool": ("kafka-storage.sh", "formats the disks of a Kafka broker"),
    "kafka.tools.TestRaftServer": ("TestRaftServer", "is a server of Kafka's own tests"),
    "kafka.Kafka": ("kafka-server-start.sh", "is Apache Kafka's server"),
    "kafka.server.KafkaConfig": ("KafkaConfig", "prints the settings of Apache Kafka's broker"),
    "kafka.docker.KafkaDockerWrapper": ("KafkaDockerWrapper", "starts Apache Kafka's server in a container"),
}
"""Classes with a ``main`` that do not need a cluster."""

_HEAD = f"""# Apache Kafka's command-line tools

Every command-line tool of Apache Kafka {KAFKA_VERSION}, unmodified, run against a cluster of processes. A tool works, or it is
refused with a message that names what is missing. Generated from the runs in `tests/integration/test_kafka_tools.py`.

| tool | task | result |
| --- | --- | --- |"""

_REST = """
These tools do not talk to a cluster:

| tool | what it does |
| --- | --- |"""


def page() -> str:
    """Return ``docs/reference/kafka-tools.md``."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for tool in KAFKA_TOOLS:
        for step in tool.steps:
            reason = f": {step.prints}" if step.result is Result.REFUSED else ""
            yield f"| `{tool.script}` | {step.what} | {step.result.value}{reason} |"
    yield _REST
    yield from (f"| `{script}` | {what} |" for script, what in NOT_FOR_CLUSTERS.values())


if __name__ == "__main__":
    sys.stdout.write(page())
