"""Topic and broker configuration: names, bounds, defaults, and the parsed form."""

from __future__ import annotations

import contextlib
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.admin.config_rows import ConfigRow, broker_config_rows, default_config_rows, topic_config_rows
from stratalog_broker.admin.errors import InvalidTopic
from stratalog_broker.admin.topic_names import check_topic_name
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.errors import Invalid
from stratalog_core.quorum import majority
from stratalog_metadata.records import Topic
from stratalog_metadata.topic_rules.config_keys import ConfigKind, ConfigSource
from stratalog_metadata.topic_rules.topic_configs import (
    TOPIC_CONFIG_KEYS,
    TOPIC_CONFIGS_NOT_SERVED,
    TopicConfigs,
    check_topic_configs,
    check_topic_defaults,
    topic_config_name,
)
from stratalog_tiering.config import TieringSettings


def topic(replication_factor: int = 3, **configs: str) -> Topic:
    named = {name.replace("_", "."): value for name, value in configs.items()}
    return Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=replication_factor, configs=named)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("retention.msec", "1", "unknown topic config 'retention.msec'; did you mean 'retention.ms'?"),
        ("retention.ms", "-2", "retention.ms is -2; minimum is -1"),
        ("retention.ms", "soon", "it must be of type long"),
        ("max.message.bytes", "99999999999", "maximum is 67108864"),
        ("remote.log.delete.on.disable", "true", "no change of a config deletes records"),
        ("remote.log.copy.disable", "paused", "remote.log.copy.disable is paused; choose true or false"),
        ("local.retention.ms", "-3", "local.retention.ms is -3; minimum is -2"),
        (
            "local.retention.ms",
            "-1",
            "local.retention.ms is -1; maximum is retention.ms, 604800000; lower it, or raise retention",
        ),
        ("local.retention.ms", "604800001", "local.retention.ms is 604800001; maximum is retention.ms, 604800000"),
        ("compression.type", "brotli", "compression.type is brotli; choose uncompressed or zstd or lz4"),
        ("compression.gzip.level", "0", "compression.gzip.level is 0; choose -1 or 1 or 2"),
        ("compression.lz4.level", "18", "compression.lz4.level is 18; maximum is 17"),
        ("compression.zstd.level", "23", "compression.zstd.level is 23; maximum is 22"),
        ("message.timestamp.type", "Never", "choose CreateTime or LogAppendTime"),
        ("preallocate", "true", "preallocate is true; only false is supported"),
        ("flush.messages", "1000", "flush.messages is 1000; only 1 is supported: every batch is on disk before it is ackn"),
        ("cleanup.policy", "compacted", "cleanup.policy is compacted; choose compact or delete"),
        ("min.compaction.lag.ms", "-1", "min.compaction.lag.ms is -1; minimum is 0"),
        ("max.compaction.lag.ms", "0", "max.compaction.lag.ms is 0; minimum is 1"),
        ("delete.retention.ms", "-1", "delete.retention.ms is -1; minimum is 0"),
        ("min.cleanable.dirty.ratio", "1.1", "min.cleanable.dirty.ratio is 1.1; maximum is 1"),
        ("min.cleanable.dirty.ratio", "nan", "min.cleanable.dirty.ratio is nan; minimum is 0"),
        ("min.cleanable.dirty.ratio", "half", "min.cleanable.dirty.ratio is half; it must be of type double"),
        ("min.insync.replicas", "0", "min.insync.replicas is 0; minimum is 1"),
        ("stratalog.tier.storage.class", "GLACIER", "stratalog.tier.storage.class is GLACIER; choose STANDARD or STANDARD_IA"),
        ("stratalog.tier.compression", "gzip", "stratalog.tier.compression is gzip; choose none or zstd"),
        ("stratalog.tier.compression.zstd.level", "20", "stratalog.tier.compression.zstd.level is 20; maximum is 19"),
        ("stratalog.ack.quorum", "4", "maximum is the replication factor, 3"),
    ],
)
def test_what_is_refused_and_how(name: str, value: str, complaint: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_topic_configs({name: value}, 3)
    assert complaint in refused.value.message


def test_what_tools_commonly_send_is_accepted() -> None:
    check_topic_configs(
        {
            "cleanup.policy": "delete", "compression.type": "producer", "flush.messages": "1", "segment.bytes": "1073741824",
            "retention.ms": "-1", "message.timestamp.type": "LogAppendTime", "unclean.leader.election.enable": "False",
            "local.retention.ms": "-2", "min.insync.replicas": "2", "segment.jitter.ms": "60000",
        },
        3,
    )  # fmt: skip
    check_topic_configs({"cleanup.policy": "compact"}, 1, internal=True)
    check_topic_configs({"cleanup.policy": "compact", "min.insync.replicas": "3", "segment.bytes": "1000000"}, 3, internal=True)


@pytest.mark.parametrize(
    ("configs", "complaint"),
    [
        ({}, "cleanup.policy is delete; an internal topic requires compact"),
        ({"cleanup.policy": "compact,delete"}, "an internal topic requires compact"),
        (
            {"cleanup.policy": "compact", "min.insync.replicas": "1"},
            "min.insync.replicas is 1; an internal topic with 3 copies requires 2 to 3",
        ),
        ({"cleanup.policy": "compact", "min.insync.replicas": "4"}, "requires 2 to 3"),
        ({"cleanup.policy": "compact", "stratalog.ack.quorum": "1"}, "stratalog.ack.quorum cannot be set"),
        ({"cleanup.policy": "compact", "min.insync.replicas": "x"}, "min.insync.replicas is x"),
        ({"cleanup.policy": "compact", "retention.ms": "5"}, "retention.ms cannot be set for an internal topic; choose one of"),
        ({"cleanup.policy": "compact", "segment.ms": "5"}, "segment.ms"),
    ],
)
def test_what_is_refused_of_an_internal_topic(configs: dict[str, str], complaint: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_topic_configs(configs, 3, internal=True)
    assert complaint in refused.value.message


@pytest.mark.parametrize("name", TOPIC_CONFIGS_NOT_SERVED)
def test_names_that_say_nothing_here_are_refused_whatever_their_value(name: str) -> None:
    assert name not in TOPIC_CONFIG_KEYS
    with pytest.raises(Invalid, match=f"topic config {name} is not supported: .*; leave it out"):
        check_topic_configs({name: "0"}, 3)


@pytest.mark.parametrize("name", [name for name, key in TOPIC_CONFIG_KEYS.items() if key.is_fixed])
def test_what_always_holds_takes_no_other_value(name: str) -> None:
    key = TOPIC_CONFIG_KEYS[name]
    check_topic_configs({name: key.default}, 3)
    with pytest.raises(Invalid, match=f"{name} is 12345; only {key.default} is supported: {key.reason[:20]}"):
        check_topic_configs({name: "12345"}, 3)


@pytest.mark.parametrize(
    ("configs", "complaint"),
    [
        ({"min.compaction.lag.ms": "6", "max.compaction.lag.ms": "5"}, "min.compaction.lag.ms is 6; maximum is max.compaction"),
        ({"cleanup.policy": "compact", "remote.storage.enable": "false"}, "cleanup.policy=compact needs the object store"),
        (
            {
                "cleanup.policy": "delete,compact",
                "stratalog.tier.lock.mode": "governance",
                "stratalog.tier.lock.ms": "86400000",
            },
            "cleanup.policy=compact removes records, which stratalog.tier.lock.mode forbids",
        ),
    ],
)
def test_configs_of_compaction_that_contradict_others_are_refused(configs: dict[str, str], complaint: str) -> None:
    with pytest.raises(Invalid, match=complaint):
        check_topic_configs(configs, 3)
    first = next(iter(configs))
    with pytest.raises(Invalid, match=complaint):
        check_topic_configs({first: configs[first]}, 3, defaults={name: configs[name] for name in configs if name != first})


def test_a_compacted_topic_needs_keys_and_seals_its_ledgers_in_time() -> None:
    compacted = TopicConfigs.of(topic(cleanup_policy="compact,delete", max_compaction_lag_ms="1000"), {})
    assert (compacted.is_compacted, compacted.segment_ms) == (True, 1_000)
    assert TopicConfigs.of(topic(), {"cleanup.policy": "compact"}).is_compacted
    plain = TopicConfigs.of(topic(max_compaction_lag_ms="1000"), {})
    assert (plain.is_compacted, plain.segment_ms) == (False, 3_600_000)


def test_the_parsed_form_has_defaults_and_overrides() -> None:
    plain = TopicConfigs.of(topic(), {})
    assert (plain.segment_ms, plain.max_message_bytes, plain.min_insync_replicas) == (3_600_000, 1_048_588, 2)
    assert not plain.is_log_append_time
    changed = TopicConfigs.of(topic(segment_ms="500", message_timestamp_type="LogAppendTime", min_insync_replicas="3"), {})
    assert (changed.segment_ms, changed.min_insync_replicas, changed.is_log_append_time) == (500, 3, True)
    assert TopicConfigs.of(topic(1), {}).min_insync_replicas == 1


def test_a_topic_goes_before_the_clusters_default_which_goes_before_the_built_in_one() -> None:
    defaults = {"segment.ms": "7000", "max.message.bytes": "100"}
    mixed = TopicConfigs.of(topic(segment_ms="500"), defaults)
    assert (mixed.segment_ms, mixed.max_message_bytes, mixed.segment_bytes) == (500, 100, 256 * 1024 * 1024)
    internal = Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=3, internal=True)
    assert TopicConfigs.of(internal, defaults) == TopicConfigs.of(topic(), {})


def synonyms(row: ConfigRow) -> list[tuple[str, str, ConfigSource]]:
    return [(one.name, one.value, one.source) for one in row.synonyms]


@given(
    copies=st.integers(1, 15),
    min_insync=st.none() | st.integers(1, 20),
    ack_quorum=st.none() | st.integers(1, 15),
)
def test_only_the_setting_of_our_own_name_takes_the_ack_quorum_below_a_majority(
    copies: int, min_insync: int | None, ack_quorum: int | None
) -> None:
    given = {"min_insync_replicas": min_insync, "stratalog_ack_quorum": ack_quorum}
    configs = TopicConfigs.of(topic(copies, **{name: str(value) for name, value in given.items() if value is not None}), {})
    assert 1 <= configs.ack_quorum <= copies
    if ack_quorum is None:
        assert configs.ack_quorum >= majority(copies)
    elif min_insync is None:
        assert configs.ack_quorum == min(ack_quorum, copies)
    assert configs.ack_quorum >= min(min_insync or 1, copies)
    assert configs.takes_acks_all == (max(min_insync or 1, ack_quorum or 1) <= copies)


def test_rows_say_where_a_value_comes_from() -> None:
    defaults = {"retention.ms": "9", "segment.ms": "7000"}
    rows = {row.name: row for row in topic_config_rows(topic(retention_ms="5"), defaults)}
    assert rows.keys() == TOPIC_CONFIG_KEYS.keys()
    assert synonyms(rows["retention.ms"]) == [
        ("retention.ms", "5", ConfigSource.TOPIC),
        ("log.retention.ms", "9", ConfigSource.DYNAMIC_DEFAULT),
        ("log.retention.ms", "604800000", ConfigSource.DEFAULT),
    ]
    assert (rows["segment.ms"].value, rows["segment.ms"].source) == ("7000", ConfigSource.DYNAMIC_DEFAULT)
    assert (rows["min.insync.replicas"].value, rows["min.insync.replicas"].source) == ("2", ConfigSource.DEFAULT)
    lower = {row.name: row for row in topic_config_rows(topic(stratalog_ack_quorum="1"), {})}
    assert (lower["min.insync.replicas"].value, lower["stratalog.ack.quorum"].value) == ("1", "1")
    assert rows["cleanup.policy"].kind is ConfigKind.LIST
    assert [(row.name, row.value) for row in default_config_rows(BrokerSettings(broker_id=1), defaults)] == [
        ("log.retention.ms", "9"),
        ("log.roll.ms", "7000"),
    ]


def test_defaults_have_kafkas_names_for_brokers() -> None:
    assert topic_config_name("log.retention.ms") == "retention.ms"
    assert topic_config_name("retention.ms") == "retention.ms"
    assert topic_config_name("nonsense") == "nonsense"


def test_broker_rows_show_all_settings_and_the_defaults_in_force() -> None:
    settings = BrokerSettings(broker_id=7, default_partitions=3)
    rows = {row.name: row for row in broker_config_rows(settings, {"retention.ms": "9"})}
    for name in ("transaction.max.timeout.ms", "transactional.id.expiration.ms", "producer.id.expiration.ms"):
        assert (rows[name].kind, rows[name].read_only) == (ConfigKind.INT, True)
    assert rows["transaction.state.log.replication.factor"].kind is ConfigKind.SHORT
    assert synonyms(rows["broker.id"]) == [("broker.id", "7", ConfigSource.STATIC_BROKER)]
    assert synonyms(rows["num.partitions"]) == [
        ("num.partitions", "3", ConfigSource.STATIC_BROKER),
        ("num.partitions", "1", ConfigSource.DEFAULT),
    ]
    assert (rows["auto.create.topics.enable"].value, rows["auto.create.topics.enable"].source) == ("true", ConfigSource.DEFAULT)
    assert rows["stratalog.append.timeout.ms"].value == str(settings.append_timeout_ms)
    assert (rows["log.retention.ms"].value, rows["log.retention.ms"].source) == ("9", ConfigSource.DYNAMIC_DEFAULT)
    changeable = {row.name for row in rows.values() if not row.read_only}
    assert changeable == {key.default_name for key in TOPIC_CONFIG_KEYS.values() if not key.is_per_topic}
    assert "stratalog.store.url" not in rows
    documented = " ".join(row.documentation for row in rows.values())
    assert all(f"[broker] {name}:" in documented for name in BrokerSettings.__dataclass_fields__)


def test_a_broker_tells_clients_where_the_store_is() -> None:
    rows = {row.name: row for row in broker_config_rows(BrokerSettings(broker_id=7), {}, "s3://bucket/logs/")}
    row = rows["stratalog.store.url"]
    assert (row.value, row.source, row.read_only) == ("s3://bucket/logs/", ConfigSource.STATIC_BROKER, True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "é", "a\n", "x" * 250])
def test_names_that_are_no_topics(name: str) -> None:
    with pytest.raises(InvalidTopic):
        check_topic_name(name)


@pytest.mark.parametrize("name", ["a", "a.b_c-D9", "x" * 249])
def test_names_of_topics(name: str) -> None:
    check_topic_name(name)


@given(
    local=st.none() | st.integers(-2, 10),
    total=st.none() | st.integers(-1, 10),
    default=st.none() | st.integers(-1, 10),
    what=st.sampled_from(["ms", "bytes"]),
)
def test_hot_copies_stay_no_longer_than_the_records(
    local: int | None, total: int | None, default: int | None, what: str
) -> None:
    """KIP-405: only an explicit limit is compared, with the retention in force."""
    given = {f"local.retention.{what}": local, f"retention.{what}": total}
    configs = {name: str(value) for name, value in given.items() if value is not None}
    defaults = {} if default is None else {f"retention.{what}": str(default)}
    built_in = 7 * 24 * 3_600_000 if what == "ms" else -1
    in_force = next(value for value in (total, default, built_in) if value is not None)
    is_longer = local not in (None, -2) and in_force != -1 and (local == -1 or (local or 0) > in_force)
    with pytest.raises(Invalid, match=rf"maximum is retention\.{what}") if is_longer else contextlib.nullcontext():
        check_topic_configs(configs, 3, defaults=defaults)


def test_local_retention_by_size_alone_is_not_cut_short_by_the_deletion_lag() -> None:
    rows = {row.name: row.value for row in topic_config_rows(topic(local_retention_bytes="5"), {})}
    assert (rows["local.retention.ms"], rows["local.retention.bytes"]) == ("-2", "5")
    unset = {row.name: row.value for row in topic_config_rows(topic(), {})}
    lag_ms = TieringSettings(worker_id="w").deletion_lag_ms
    assert (unset["local.retention.ms"], unset["local.retention.bytes"]) == (str(lag_ms), "-2")


def test_some_configs_have_no_default_for_the_cluster() -> None:
    check_topic_defaults({"remote.log.copy.disable": "true", "local.retention.ms": "0"})
    with pytest.raises(Invalid, match=r"remote\.storage\.enable has no cluster-wide default; set it for each topic"):
        check_topic_defaults({"remote.storage.enable": "true"})
    with pytest.raises(Invalid, match=r"local\.retention\.ms is 6; maximum is retention\.ms, 5"):
        check_topic_defaults({"local.retention.ms": "6", "retention.ms": "5"})
