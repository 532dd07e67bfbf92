"""Brokers are named by the address that belongs to the listener by which a request came."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from hypothesis import given
from hypothesis import strategies as st
from unit.broker.mini_cluster import in_thread, run_cluster, until_coordinated

from stratalog_broker.configs.listeners import Listener, advertised_endpoints, parse_listeners
from stratalog_core.errors import Invalid
from stratalog_core.rpc.addresses import split_address
from stratalog_metadata.records import Endpoint

NAMES = st.text("abcdefghijklmnop-_0123456789", max_size=12)
HOSTS = st.sampled_from(["localhost", "127.0.0.1", "::1", "broker-1.example"])
LISTENERS = st.builds(Listener, NAMES, HOSTS, st.integers(0, 65535))


def written(listener: Listener) -> str:
    return f"{listener.name}={listener.address}" if listener.name else listener.address


@given(st.lists(LISTENERS, min_size=1, max_size=5, unique_by=lambda listener: listener.name))
def test_listeners_are_read_as_they_are_written(listeners: list[Listener]) -> None:
    assert parse_listeners([written(listener) for listener in listeners], "listen") == tuple(listeners)


@given(st.lists(LISTENERS, min_size=1, max_size=5, unique_by=lambda listener: listener.name), st.data())
def test_a_listener_without_an_advertised_address_advertises_its_own(listeners: list[Listener], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.sampled_from(listeners)))
    endpoints = advertised_endpoints(listeners, [written(Listener(one.name, "public.example", 7777)) for one in chosen])
    for listener, endpoint in zip(listeners, endpoints, strict=True):
        host, port = ("public.example", 7777) if listener in chosen else (listener.host, listener.port)
        assert endpoint == Endpoint(listener=listener.name, host=host, port=port)


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["127.0.0.1:1", "127.0.0.1:2"], "the unnamed listener twice"),
        (["a=127.0.0.1:1", "a=127.0.0.1:2"], "listener 'a' twice"),
        (["=127.0.0.1:1"], "empty name"),
        (["a=127.0.0.1"], "not HOST:PORT"),
        (["127.0.0.1:70000"], "not HOST:PORT"),
    ],
)
def test_malformed_listeners_are_refused(texts: list[str], complaint: str) -> None:
    with pytest.raises(Invalid, match=complaint):
        parse_listeners(texts, "listen")


def test_an_address_of_an_unknown_listener_is_refused() -> None:
    with pytest.raises(Invalid, match="'outside'"):
        advertised_endpoints([Listener("", "127.0.0.1", 1)], ["outside=example:9092"])


async def test_clients_of_each_listener_are_told_its_addresses(tmp_path: Path) -> None:
    listen = ("127.0.0.1:0", "inside=127.0.0.1:0")
    async with run_cluster(tmp_path, listen=listen, advertised=("inside=localhost:0",)) as cluster:
        outside = cluster.broker.kafka_address
        (record,) = cluster.broker.advertised_brokers.live()
        _, port = record.address_for("inside")
        assert f"127.0.0.1:{port}" != outside
        assert record.address_for("unknown") == split_address(outside)
        await until_coordinated(cluster, "g")
        assert await in_thread(lambda: named_by(outside)) == {outside}
        assert await in_thread(lambda: named_by(f"127.0.0.1:{port}")) == {f"localhost:{port}"}


def named_by(bootstrap: str) -> set[str]:
    """Addresses in responses to Metadata, DescribeCluster and FindCoordinator."""
    client = AdminClient({"bootstrap.servers": bootstrap})
    metadata = client.list_topics(timeout=60)
    cluster = client.describe_cluster(request_timeout=60).result()
    group = client.describe_consumer_groups(["g"], request_timeout=60)["g"].result()
    return {f"{node.host}:{node.port}" for node in [*metadata.brokers.values(), *cluster.nodes, group.coordinator]}
