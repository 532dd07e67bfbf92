"""Topic and broker configuration: names, bounds, defaults, and the parsed form."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.broker_configs import BROKER_CONFIGS
from stratalog_broker.config import BrokerSettings
from stratalog_broker.config_keys import ConfigKind, ConfigSource
from stratalog_broker.handlers.config_rows import broker_config_rows, topic_config_rows
from stratalog_broker.protocol.errors import KafkaError
from stratalog_broker.topic_configs import TOPIC_CONFIG_KEYS, TopicConfigs, check_topic_configs
from stratalog_broker.topics import check_topic_name
from stratalog_core.errors import Invalid
from stratalog_core.quorum import majority
from stratalog_metadata.records import Topic


def topic(replication_factor: int = 3, **configs: str) -> Topic:
    named = {name.replace("_", "."): value for name, value in configs.items()}
    return Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=replication_factor, configs=named)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("retention.msec", "1", "unknown topic config 'retention.msec'; did you mean 'retention.ms'?"),
        ("retention.ms", "-2", "the least is -1"),
        ("retention.ms", "soon", "not a long"),
        ("max.message.bytes", "99999999999", "the most is 67108864"),
        ("cleanup.policy", "compact", "choose delete; compaction is not served yet"),
        ("cleanup.policy", "compact,delete", "compaction is not served yet"),
        ("remote.storage.enable", "false", "every topic is tiered"),
        ("compression.type", "brotli", "choose producer or"),
        ("preallocate", "maybe", "choose true or false"),
        ("min.insync.replicas", "0", "the least is 1"),
        ("stratalog.ack.quorum", "4", "maximum is the replication factor, 3"),
        ("min.cleanable.dirty.ratio", "nan", "the least is 0"),
        ("min.cleanable.dirty.ratio", "1.5", "the most is 1"),
    ],
)
def test_what_is_refused_and_how(name: str, value: str, complaint: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_topic_configs({name: value}, 3)
    assert complaint in refused.value.message


def test_what_tools_commonly_send_is_accepted() -> None:
    check_topic_configs(
        {
            "cleanup.policy": "delete", "compression.type": "lz4", "flush.messages": "1", "segment.bytes": "1073741824",
            "retention.ms": "-1", "message.timestamp.type": "LogAppendTime", "unclean.leader.election.enable": "True",
            "local.retention.ms": "-2", "min.insync.replicas": "2", "leader.replication.throttled.replicas": "",
        },
        3,
    )  # fmt: skip
    check_topic_configs({"cleanup.policy": "compact"}, 1, internal=True)
    check_topic_configs({"cleanup.policy": "compact", "min.insync.replicas": "3", "segment.bytes": "1000000"}, 3, internal=True)


@pytest.mark.parametrize(
    ("configs", "complaint"),
    [
        ({}, "cleanup.policy=delete of an internal topic; it has to be compact"),
        ({"cleanup.policy": "compact,delete"}, "it has to be compact"),
        (
            {"cleanup.policy": "compact", "min.insync.replicas": "1"},
            "min.insync.replicas is 1; an internal topic with 3 copies takes 2 to 3",
        ),
        ({"cleanup.policy": "compact", "min.insync.replicas": "4"}, "takes 2 to 3"),
        ({"cleanup.policy": "compact", "stratalog.ack.quorum": "1"}, "stratalog.ack.quorum cannot be set"),
        ({"cleanup.policy": "compact", "min.insync.replicas": "x"}, "min.insync.replicas=x"),
        ({"cleanup.policy": "compact", "retention.ms": "5"}, "retention.ms cannot be set for an internal topic; choose of"),
        ({"cleanup.policy": "compact", "segment.ms": "5"}, "segment.ms"),
    ],
)
def test_what_is_refused_of_an_internal_topic(configs: dict[str, str], complaint: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_topic_configs(configs, 3, internal=True)
    assert complaint in refused.value.message


def test_the_parsed_form_has_defaults_and_overrides() -> None:
    plain = TopicConfigs.of(topic())
    assert (plain.retention_ms, plain.max_message_bytes, plain.min_insync_replicas) == (604_800_000, 1_048_588, 2)
    assert not plain.is_log_append_time
    changed = TopicConfigs.of(topic(retention_ms="5", message_timestamp_type="LogAppendTime", min_insync_replicas="3"))
    assert (changed.retention_ms, changed.min_insync_replicas, changed.is_log_append_time) == (5, 3, True)
    assert TopicConfigs.of(topic(1)).min_insync_replicas == 1


@given(
    copies=st.integers(1, 15),
    min_insync=st.none() | st.integers(1, 20),
    ack_quorum=st.none() | st.integers(1, 15),
)
def test_only_the_setting_of_our_own_name_takes_the_ack_quorum_below_a_majority(
    copies: int, min_insync: int | None, ack_quorum: int | None
) -> None:
    given = {"min_insync_replicas": min_insync, "stratalog_ack_quorum": ack_quorum}
    configs = TopicConfigs.of(topic(copies, **{name: str(value) for name, value in given.items() if value is not None}))
    assert 1 <= configs.ack_quorum <= copies
    if ack_quorum is None:
        assert configs.ack_quorum >= majority(copies)
    elif min_insync is None:
        assert configs.ack_quorum == min(ack_quorum, copies)
    assert configs.ack_quorum >= min(min_insync or 1, copies)
    assert configs.takes_acks_all == (max(min_insync or 1, ack_quorum or 1) <= copies)


def test_rows_say_where_a_value_comes_from() -> None:
    rows = {row.name: row for row in topic_config_rows(topic(retention_ms="5"))}
    assert rows.keys() == TOPIC_CONFIG_KEYS.keys()
    assert (rows["retention.ms"].value, rows["retention.ms"].source) == ("5", ConfigSource.TOPIC)
    assert rows["retention.ms"].default == "604800000"
    assert (rows["min.insync.replicas"].value, rows["min.insync.replicas"].source) == ("2", ConfigSource.DEFAULT)
    lower = {row.name: row for row in topic_config_rows(topic(stratalog_ack_quorum="1"))}
    assert (lower["min.insync.replicas"].value, lower["stratalog.ack.quorum"].value) == ("1", "1")
    assert rows["cleanup.policy"].kind is ConfigKind.LIST


def test_broker_rows_show_the_settings() -> None:
    rows = {row.name: row for row in broker_config_rows(BrokerSettings(broker_id=7, default_partitions=3))}
    assert rows["broker.id"].value == "7"
    assert rows["num.partitions"].value == "3"
    assert rows["auto.create.topics.enable"].value == "true"
    assert all(row.read_only for row in rows.values())
    fields = BrokerSettings.__dataclass_fields__
    assert all(config.setting in fields for config in BROKER_CONFIGS.values() if config.setting)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "é", "a\n", "x" * 250])
def test_names_that_are_no_topics(name: str) -> None:
    with pytest.raises(KafkaError):
        check_topic_name(name)


@pytest.mark.parametrize("name", ["a", "a.b_c-D9", "x" * 249])
def test_names_of_topics(name: str) -> None:
    check_topic_name(name)


def test_a_bound_that_is_not_served_is_refused_with_the_reason() -> None:
    with pytest.raises(
        Invalid, match=r"local\.retention\.bytes=1000000: the most is -2; .*local\.retention\.ms bounds by time"
    ):
        check_topic_configs({"local.retention.bytes": "1000000"}, replication_factor=3, internal=False)
