"""Options: Spark's names and precedence are kept, and what is wrong is refused by name with its remedy."""

from __future__ import annotations

import pytest

from stratalog_core.errors import Invalid
from stratalog_pipeline.options import (
    EARLIEST,
    LATEST,
    AllAt,
    Assigned,
    AtOffsets,
    AtTimestamp,
    AtTimestamps,
    Matching,
    ReadOptions,
    Subscribed,
    parse_options,
)


def parsed(**options: str) -> ReadOptions:
    return parse_options({"path": "/bucket", "subscribe": "flights", **options})


def test_defaults_read_all_there_is() -> None:
    options = parsed()
    assert options.store == "/bucket"
    assert options.wanted == Subscribed(topics=("flights",))
    assert (options.start, options.end) == (AllAt(position=EARLIEST), AllAt(position=LATEST))
    assert options.fail_on_data_loss
    assert options.read_committed
    assert not options.include_headers
    assert not options.skips_corrupt
    assert parsed(onCorruptBatch="Skip").skips_corrupt


def test_names_are_case_insensitive_and_path_may_be_called_store() -> None:
    options = parse_options({"STORE": "s3://b/p", "Subscribe": "a, b,a", "INCLUDEHEADERS": "TRUE", "minpartitions": "7"})
    assert options.store == "s3://b/p"
    assert options.wanted == Subscribed(topics=("a", "b"))
    assert (options.include_headers, options.min_partitions) == (True, 7)


def test_options_of_the_client_are_passed_on_without_their_prefix() -> None:
    given = {"kafka.bootstrap.servers": "x:9092", "kafka.security.protocol": "SSL", "kafkaConsumer.pollTimeoutMs": "5"}
    options = parsed(**given)
    assert options.client == {"bootstrap.servers": "x:9092", "security.protocol": "SSL"}
    assert options.poll_timeout_s == 0.005
    assert "SSL" not in repr(options), "options of the client may be secrets"


def test_options_of_the_client_mean_nothing_without_servers() -> None:
    assert parsed(**{"kafka.security.protocol": "SSL", "groupIdPrefix": "p", "fetchOffset.numRetries": "3"}) == parsed()


def test_brokers_may_tell_the_store() -> None:
    assert parse_options({"subscribe": "a", "kafka.bootstrap.servers": "x:9092"}).store == ""


def test_a_start_beyond_an_end_of_another_kind_is_an_empty_read() -> None:
    options = parsed(startingOffsets='{"flights": {"0": 6}}', endingOffsets='{"flights": {"0": -1}}', endingTimestamp="5")
    assert options.end == AtTimestamp(timestamp_ms=5)
    ends = '{"flights": {"0": -1}}'
    assert parsed(startingOffsets='{"flights": {"0": 6}}', endingOffsets=ends).end == AtOffsets(
        offsets={"flights": {0: LATEST}}
    )


def test_isolation_may_be_said_in_kafkas_way() -> None:
    assert not parsed(**{"kafka.isolation.level": "read_uncommitted"}).read_committed
    assert parsed(**{"kafka.isolation.level": "read_uncommitted", "isolationLevel": "read_committed"}).read_committed


def test_topics_are_wanted_in_one_of_three_ways() -> None:
    assert parse_options({"path": "/b", "assign": '{"a": [2, 0, 2], "b": [1]}'}).wanted == Assigned(
        partitions={"a": (0, 2), "b": (1,)}
    )
    assert parse_options({"path": "/b", "subscribePattern": " fl.* "}).wanted == Matching(pattern="fl.*")


def test_the_more_special_bound_counts() -> None:
    offsets, times = '{"flights": {"0": 5}}', '{"flights": {"0": 1000}}'
    assert parsed(startingOffsets=offsets).start == AtOffsets(offsets={"flights": {0: 5}})
    assert parsed(startingOffsets=offsets, startingOffsetsByTimestamp=times).start == AtTimestamps(
        timestamps_ms={"flights": {0: 1000}}
    )
    everything = parsed(endingOffsets=offsets, endingOffsetsByTimestamp=times, endingTimestamp="17")
    assert everything.end == AtTimestamp(timestamp_ms=17)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscibe": "x"}, "option 'subscibe' is unknown; did you mean 'subscribe'"),
        ({"zzz": "x"}, "option 'zzz' is unknown; known are path"),
        ({"assign": '{"a": [0]}'}, "exactly one of the options"),
        ({"store": "/other"}, "contradict each other"),
        ({"columns": " , "}, "option 'columns' must name different columns"),
        ({"columns": "offset,offset"}, "option 'columns' must name different columns"),
        ({"manifestVersion": "12"}, "option 'manifestVersion' must look like"),
        ({"manifestVersion": '{"flights": {"0": 0}}'}, "a value is below 1"),
        (
            {"manifestVersion": '{"flights": {"0": 1}}', "kafka.bootstrap.servers": "x:1"},
            "cannot be used with kafka.bootstrap.servers",
        ),
        ({"path": " "}, "both missing"),
        ({"path": " ", "kafka.acks": "1"}, "or kafka.bootstrap.servers"),
        ({"kafka.auto.offset.reset": "latest"}, "option 'kafka.auto.offset.reset' is not supported"),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "'minOffsetsPerTrigger' is 5; maximum is"),
        (
            {"startingOffsets": '{"flights": {"0": 6}}', "endingOffsets": '{"flights": {"0": 5}}'},
            "flights-0 starts at 6, which is after its end, 5",
        ),
        (
            {"startingOffsetsByTimestamp": '{"a": {"1": 6}}', "endingOffsetsByTimestamp": '{"a": {"1": 5}}'},
            "a-1 starts at 6, which is after its end, 5",
        ),
        ({"subscribe": " , "}, "names no topic"),
        ({"startingOffsets": "latest"}, "cannot be 'latest' in a batch read"),
        ({"endingOffsets": "earliest"}, "cannot be 'earliest' in a batch read"),
        ({"startingOffsets": '{"flights": {"0": -1}}'}, "-1 for topic 'flights' would make the read empty"),
        ({"endingOffsets": '{"flights": {"0": -2}}'}, "-2 for topic 'flights' would make the read empty"),
        ({"startingOffsets": '{"flights": {"0": -3}}'}, "a value is below -2"),
        ({"startingOffsets": '{"flights": {"0": 9223372036854775808}}'}, "a value is above 9223372036854775807"),
        ({"startingTimestamp": "9223372036854775808"}, "maximum is 9223372036854775807"),
        ({"startingOffsets": "[]"}, "option 'startingOffsets' must look like"),
        ({"startingOffsets": '{"flights": {"x": 1}}'}, "option 'startingOffsets' must look like"),
        ({"startingOffsetsByTimestamp": '{"flights": {"0": -1}}'}, "a value is below 0"),
        ({"startingTimestamp": "soon"}, "option 'startingTimestamp' must be an integer"),
        ({"minPartitions": "0"}, "option 'minPartitions' is 0; minimum is 1"),
        ({"failOnDataLoss": "maybe"}, "option 'failOnDataLoss' must be one of true, false"),
        ({"onCorruptBatch": "ignore"}, "option 'onCorruptBatch' must be one of fail, skip, not 'ignore'"),
        ({"onCorruptBatch": "skip", "table": "blocks"}, "'onCorruptBatch' leaves out records"),
        ({"isolationLevel": "snapshot"}, "option 'isolationLevel' must be one of"),
        ({"kafka.isolation.level": "snapshot"}, "option 'kafka.isolation.level' must be one of"),
    ],
)
def test_what_is_wrong_is_refused_by_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid) as refused:
        parsed(**options)
    assert message in refused.value.message


def test_a_stream_begins_behind_the_latest_record_and_has_no_end() -> None:
    stream = parse_options({"path": "/b", "subscribe": "a"}, "stream")
    assert (stream.start, stream.end) == (AllAt(position=LATEST), AllAt(position=LATEST))
    given = {"path": "/b", "subscribe": "a", "startingOffsets": '{"a": {"0": -1, "1": -2}}', "maxOffsetsPerTrigger": "10"}
    stream = parse_options({**given, "minOffsetsPerTrigger": "4", "maxTriggerDelay": "2 m"}, "stream")
    assert stream.start == AtOffsets(offsets={"a": {0: -1, 1: -2}})
    assert (stream.rows_per_trigger_max, stream.rows_per_trigger_min, stream.trigger_delay_max_s) == (10, 4, 120)
    with pytest.raises(Invalid, match="'endingTimestamp' has no effect in a stream"):
        parse_options({**given, "endingTimestamp": "1"}, "stream")
    with pytest.raises(Invalid, match="a stream without brokers never has the tail"):
        parse_options({**given, "missingTail": "fail"}, "stream")
    followed = {**given, "missingTail": "fail", "kafka.bootstrap.servers": "x:9092"}
    assert parse_options(followed, "stream").missing_tail == "fail"
    with pytest.raises(Invalid, match="'blocks' cannot be streamed"):
        parse_options({"path": "/b", "subscribe": "a", "table": "blocks"}, "stream")


def test_before_the_kind_of_read_is_known_only_what_both_refuse_is_refused() -> None:
    assert parse_options({"path": "/b", "subscribe": "a", "startingOffsets": "latest"}, "either").start == AllAt(
        position=LATEST
    )
    assert parse_options({"path": "/b", "subscribe": "a", "endingTimestamp": "7"}, "either").end == AtTimestamp(timestamp_ms=7)
    with pytest.raises(Invalid, match="must look like"):
        parse_options({"path": "/b", "subscribe": "a", "startingOffsets": "soon"}, "either")


@pytest.mark.parametrize(
    ("text", "seconds"), [("250", 0.25), ("250ms", 0.25), ("3s", 3), ("15m", 900), ("2 h", 7200), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parsed(maxTriggerDelay=text).trigger_delay_max_s == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1.5s", "3 weeks"])
def test_malformed_durations_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match="maxTriggerDelay"):
        parsed(maxTriggerDelay=text)


@pytest.mark.parametrize("text", ["{}", '{"a": []}', '{"a": [-1]}', '{"a": 1}', "a"])
def test_a_malformed_assignment_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="option 'assign'"):
        parse_options({"path": "/b", "assign": text})


def test_a_malformed_pattern_is_refused() -> None:
    with pytest.raises(Invalid, match="not a regular expression"):
        parse_options({"path": "/b", "subscribePattern": "("})
