"""Metrics that clients push: subscriptions, refusals, limits, and a client that does it all over the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from opentelemetry.proto.metrics.v1 import metrics_pb2
from unit.broker.hand_fed_view import HandFedView
from unit.broker.mini_cluster import MiniCluster
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.configs.client_metrics_configs import ClientPattern
from stratalog_broker.metrics import PushedMetric, TelemetryMetrics
from stratalog_broker.telemetry import client_instances, pushed_metrics
from stratalog_broker.telemetry.client_instances import ClientInstances, Refusal, TelemetryRefused
from stratalog_broker.telemetry.otlp import SAMPLES_MAX, Sample, decode_metrics
from stratalog_broker.telemetry.pushed_metrics import PushedMetrics
from stratalog_broker.telemetry.service import PUSH_BYTES_MAX
from stratalog_broker.telemetry.subscriptions import INTERVAL_MS_DEFAULT, Asked, Subscriptions
from stratalog_core.batches.compression import NAMES, compress
from stratalog_core.errors import Corrupt, Invalid
from stratalog_metadata.records import CLIENT_METRICS_CONFIGS, DynamicConfig

JAVA = {"client_id": "c-1", "client_software_name": "apache-kafka-java", "client_software_version": "4.3.1"}
FIRST, SECOND = UUID(int=1), UUID(int=2)
MIB = 1024 * 1024


def subscription(name: str, **configs: str) -> DynamicConfig:
    return DynamicConfig(
        resource=CLIENT_METRICS_CONFIGS + name, configs={key.replace("_", "."): value for key, value in configs.items()}
    )


# -- subscriptions


def test_subscriptions_that_apply_are_joined() -> None:
    view = HandFedView()
    subscriptions = Subscriptions(view)
    assert subscriptions.asked_of(JAVA) == Asked((), INTERVAL_MS_DEFAULT)
    view.put(
        subscription("a", metrics="x.,y.", interval_ms="2000", match="client_software_name=apache-.*,client_id=c-[0-9]"),
        subscription("b", metrics="y.,z."),
        subscription("other", metrics="never.", interval_ms="100", match="client_id=d.*"),
        DynamicConfig(resource="group/readers", configs={}),
    )
    assert subscriptions.asked_of(JAVA) == Asked(("x.", "y.", "z."), 2000)
    view.put(subscription("all", metrics="*"))
    assert subscriptions.asked_of(JAVA).metrics == ("*",)
    assert subscriptions.version == 2
    subscriptions.close()


@pytest.mark.parametrize("text", ["colour=blue", "client_id", "client_id=(", "client_id=(?=x)"])
def test_a_pattern_that_cannot_match_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="match has"):
        ClientPattern(text)


def test_a_pattern_matches_the_whole_field_in_linear_time() -> None:
    pattern = ClientPattern("client_id = (a*)*b")
    assert pattern.matches({"client_id": "aab"})
    assert not pattern.matches({"client_id": "a" * 50_000})
    assert not pattern.matches({})


# -- instances


class Bench:
    def __init__(self) -> None:
        self.view = HandFedView()
        self.view.put(subscription("a", metrics="x.", interval_ms="1000"))
        self.instances = ClientInstances(Subscriptions(self.view), Random(1))

    def refusal(self, call: Callable[[], object]) -> Refusal:
        with pytest.raises(TelemetryRefused) as refused:
            call()
        return refused.value.refusal


def test_a_client_may_ask_and_push_once_per_interval() -> None:
    bench = Bench()
    new = bench.instances.get(None, JAVA, 0)
    identity, number = new.instance_id, new.subscription_id
    assert new.asked == Asked(("x.",), 1000)
    assert -(2**31) <= number < 2**31

    def push(now_ms: int, *, is_last: bool = False, subscription_id: int = number) -> object:
        return bench.instances.push(identity, subscription_id, JAVA, now_ms, is_last=is_last)

    assert bench.refusal(lambda: bench.instances.get(identity, JAVA, 999)) is Refusal.TOO_EARLY
    push(500)
    assert bench.refusal(lambda: push(1499)) is Refusal.TOO_EARLY
    push(1500)
    assert bench.refusal(lambda: push(2500, subscription_id=number + 1)) is Refusal.UNKNOWN_SUBSCRIPTION
    assert bench.instances.get(identity, JAVA, 2501) is new
    push(2600, is_last=True)
    assert bench.refusal(lambda: push(9000)) is Refusal.TERMINATED


def test_a_changed_subscription_has_another_id() -> None:
    bench = Bench()
    before = bench.instances.get(FIRST, JAVA, 0)
    bench.view.put(subscription("a", metrics="y.", interval_ms="1000"))
    refused = bench.refusal(lambda: bench.instances.push(FIRST, before.subscription_id, JAVA, 2000, is_last=False))
    assert refused is Refusal.UNKNOWN_SUBSCRIPTION
    after = bench.instances.get(FIRST, JAVA, 2001)
    assert (after.asked.metrics, after.subscription_id != before.subscription_id) == (("y.",), True)


def test_instances_are_bounded_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_instances, "INSTANCES_MAX", 2)
    bench = Bench()
    for number, identity in enumerate((FIRST, SECOND, UUID(int=3))):
        bench.instances.get(identity, JAVA, number * 1000)
    assert (len(bench.instances), FIRST in bench.instances) == (2, False)
    bench.instances.expire(1000 + client_instances.EXPIRY_MS_MIN)
    assert (len(bench.instances), SECOND in bench.instances) == (1, False)


# -- values


def pushed(**values: float) -> bytes:
    data = metrics_pb2.MetricsData()
    scope = data.resource_metrics.add().scope_metrics.add()
    for name, value in values.items():
        metric = scope.metrics.add(name=f"org.apache.kafka.{name}")
        metric.sum.aggregation_temporality = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
        point = metric.sum.data_points.add(as_double=value)
        point.attributes.add(key="node.id").value.int_value = 1
        point.attributes.add(key="a").value.string_value = "b"
    return bytes(data.SerializeToString())


@pytest.mark.parametrize("codec", NAMES.values())
def test_pushed_metrics_are_decoded(codec: int) -> None:
    content = compress(codec, pushed(rate=1.5, total=7))
    assert decode_metrics(content, codec, MIB) == [
        Sample("org.apache.kafka.rate", "a=b,node.id=1", 1.5, False),
        Sample("org.apache.kafka.total", "a=b,node.id=1", 7.0, False),
    ]


def test_a_push_is_bounded() -> None:
    many = pushed(**{f"m{number}": 1.0 for number in range(SAMPLES_MAX + 5)})
    assert len(decode_metrics(many, 0, MIB)) == SAMPLES_MAX
    with pytest.raises(Corrupt, match="beyond the limit"):
        decode_metrics(compress(4, bytes(2 * MIB)), 4, MIB)


@given(content=st.binary(max_size=200), codec=st.sampled_from(sorted(NAMES.values())))
@settings(max_examples=200, deadline=None)
def test_broken_bytes_are_corrupt_or_nothing(content: bytes, codec: int) -> None:
    with contextlib.suppress(Corrupt):
        assert len(decode_metrics(content, codec, MIB)) <= SAMPLES_MAX


def test_values_are_replaced_added_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushed_metrics, "SERIES_MAX", 2)
    store = PushedMetrics()
    store.put(FIRST, "c", [Sample("m", "", 1.0, False), Sample("d", "", 2.0, True)])
    store.put(FIRST, "c", [Sample("m", "", 5.0, False), Sample("d", "", 2.0, True)])
    store.put(SECOND, "c", [Sample("m", "", 1.0, False)])
    assert {(one.metric, one.last_value) for one in store.metrics()} == {("m", 5.0), ("d", 4.0)}
    assert store.dropped == 1
    store.keep(lambda instance_id: instance_id != FIRST)
    store.put(SECOND, "c", [Sample("m", "", 1.0, False)])
    assert [(one.client_instance_id, one.last_value) for one in store.metrics()] == [(str(SECOND), 1.0)]


def test_clients_without_values_leave_nothing_between_two_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client that pushed nothing, or too late for the bound, left an entry until the next scrape, if there was one."""
    monkeypatch.setattr(pushed_metrics, "SERIES_MAX", 2)
    store = PushedMetrics()
    for number in range(100):
        store.put(UUID(int=number), "c", [Sample("m", "", 1.0, False)] if number % 2 else [])
    assert len(store) == 2
    store.put(UUID(int=1), "c", [])
    assert (len(store), [one.client_instance_id for one in store.metrics()]) == (1, [str(UUID(int=3))])


# -- over the wire


async def alter(client: WireClient, **configs: str) -> Any:
    rows = tuple(
        part(44, 1, "AlterableConfig", name=name.replace("_", "."), config_operation=0, value=value)
        for name, value in configs.items()
    )
    resource = part(44, 1, "AlterConfigsResource", resource_type=16, resource_name="everybody", configs=rows)
    answer = await client.send(44, 1, resources=(resource,), validate_only=False)
    return answer.responses[0]


async def test_a_client_pushes_what_it_is_asked_for(mini_cluster: MiniCluster) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        await client.send(18, 4, client_software_name="wire", client_software_version="1.0")
        assert (await client.send(71, 0, client_instance_id=None)).requested_metrics == ()
        altered = await alter(client, metrics="org.apache.kafka.", interval_ms="3600000", match="client_software_name=wire")
        assert altered.error_code is ErrorCode.none
        asked = await client.send(71, 0, client_instance_id=FIRST)
        assert (asked.error_code, asked.requested_metrics) == (ErrorCode.none, ("org.apache.kafka.",))
        assert (asked.client_instance_id, asked.telemetry_max_bytes) == (FIRST, PUSH_BYTES_MAX)
        assert (await client.send(71, 0, client_instance_id=FIRST)).error_code is ErrorCode.throttling_quota_exceeded

        async def push(content: bytes, codec: int = 4, identity: UUID | None = FIRST, **changes: Any) -> ErrorCode:
            fields = {"subscription_id": asked.subscription_id, "terminating": False, **changes}
            answer = await client.send(72, 0, client_instance_id=identity, compression_type=codec, metrics=content, **fields)
            code: ErrorCode = answer.error_code
            return code

        assert await push(compress(4, pushed(rate=1.5))) is ErrorCode.none
        assert await push(b"") is ErrorCode.throttling_quota_exceeded
        assert await push(b"", identity=None) is ErrorCode.invalid_request
        assert await push(b"", codec=9) is ErrorCode.unsupported_compression_type
        assert await push(bytes(PUSH_BYTES_MAX + 1)) is ErrorCode.telemetry_too_large
        assert await push(b"", subscription_id=0, identity=SECOND) is ErrorCode.unknown_subscription_id
        groups = list(mini_cluster.broker.metrics())
        values = [one for one in groups if isinstance(one, PushedMetric)]
        assert [(one.client_id, one.metric, one.last_value) for one in values] == [("wire", "org.apache.kafka.rate", 1.5)]
        (counts,) = [one for one in groups if isinstance(one, TelemetryMetrics)]
        assert (counts.pushes, counts.refused_pushes, counts.client_instances) == (1, 2, 3)
        assert await push(b"not zstd", terminating=True) is ErrorCode.invalid_record
        assert await push(b"", terminating=True) is ErrorCode.invalid_request


@pytest.mark.parametrize(
    ("config", "value", "code"),
    [
        ("interval_ms", "99", ErrorCode.invalid_request),
        ("no_such", "1", ErrorCode.invalid_request),
        ("match", "colour=blue", ErrorCode.invalid_config),
    ],
)
async def test_a_subscription_that_is_not_valid_is_refused(
    mini_cluster: MiniCluster, config: str, value: str, code: ErrorCode
) -> None:
    async with connect(mini_cluster.bootstrap) as client:
        assert (await alter(client, **{config: value})).error_code is code
