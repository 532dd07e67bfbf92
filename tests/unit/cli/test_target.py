"""Which cluster a command speaks to, when it is told and when it is not."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import click
import pytest

from stratalog.local.state import ClusterState, save_state
from stratalog.target import DEFAULT_BOOTSTRAP, bootstrap_of, kafka_options, metadata_of, store_of
from stratalog.topic_deletion import delete_named
from stratalog_core.errors import NotFound, Unavailable


def _save(directory: Path, port: int) -> None:
    directory.mkdir()
    state = ClusterState(bootstrap=f"127.0.0.1:{port}", metadata=f"127.0.0.1:{port + 1}", store=f"{port}", processes=())
    save_state(directory, state)


def test_a_cluster_in_data_is_the_default_for_every_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bootstrap_of(None, None) == DEFAULT_BOOTSTRAP
    _save(tmp_path / "data", 7000)
    _save(tmp_path / "other", 8000)
    assert (bootstrap_of(None, None), metadata_of(None, None), store_of(None, None)) == (
        "127.0.0.1:7000",
        ["127.0.0.1:7001"],
        "7000",
    )
    assert bootstrap_of(Path("other"), None) == "127.0.0.1:8000"
    assert bootstrap_of(Path("other"), "127.0.0.1:9000") == bootstrap_of(None, "127.0.0.1:9000") == "127.0.0.1:9000"


def _unavailable(**_: Any) -> None:
    raise Unavailable("Broker transport failure")


def test_a_failure_names_the_brokers_only_if_none_accepts_a_connection() -> None:
    command = kafka_options(_unavailable)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # Does not listen, and keeps its port from others.
        up, down = (f"127.0.0.1:{each.getsockname()[1]}" for each in (server, silent))
        with pytest.raises(Unavailable) as found:
            command(data=None, bootstrap=f"{down},{up}")
        assert found.value.message == "Broker transport failure"
        with pytest.raises(Unavailable, match=r"^Broker transport failure$"):
            command(data=None, bootstrap=f"PLAINTEXT://{up}")
        with pytest.raises(Unavailable, match=rf"be reached \({down}: Connection refused; 127.0.0.1:99999: .+\); is the"):
            command(data=None, bootstrap=f"{down},127.0.0.1:99999")


@pytest.mark.parametrize("wrong", ["127.0.0.1:99999", "127.0.0.1:0", "localhost:http", "localhost:", "good:9092, [::1]:x"])
def test_an_address_with_a_wrong_port_is_wrong_usage(wrong: str) -> None:
    with pytest.raises(click.BadParameter, match=r"the port must be a number from 1 to 65535, as in HOST:9092"):
        _parsed(wrong)


@pytest.mark.parametrize(
    "right", ["localhost", "broker-1:9092,broker-2:65535", "[::1]:9092", "[::1]", "::1", " a:1 , b:2 ", "PLAINTEXT://a"]
)
def test_addresses_that_librdkafka_takes_are_taken(right: str) -> None:
    assert _parsed(right) == right


def _parsed(bootstrap: str) -> object:
    command = click.command("show")(kafka_options(lambda data, bootstrap: bootstrap))
    return command.main(["--bootstrap", bootstrap], standalone_mode=False)


def test_a_topic_that_cannot_be_deleted_is_named() -> None:
    missing: Future[None] = Future()
    missing.set_exception(NotFound("Broker: Unknown topic or partition"))
    with pytest.raises(NotFound, match="no topic 'evnts': see `stratalog topic list`"):
        delete_named(lambda names: dict.fromkeys(names, missing), ["evnts"])


def test_topics_that_were_deleted_before_a_failure_are_named() -> None:
    missing: Future[None] = Future()
    missing.set_exception(NotFound("Broker: Unknown topic or partition"))
    deleted: Future[None] = Future()
    deleted.set_result(None)
    with pytest.raises(NotFound) as failure:
        delete_named(lambda names: {"evnts": missing, "orders": deleted}, ["evnts", "orders"])
    assert failure.value.message == "no topic 'evnts': see `stratalog topic list`; deleted orders"
