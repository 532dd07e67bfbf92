"""Which cluster a command speaks to, when it is told and when it is not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import click
import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import DeletedRecords

from stratalog.commands.consume import _Printed
from stratalog.commands.topic import low_watermarks
from stratalog.local.state import ClusterState, ProcessState, save_state
from stratalog.target import (
    DEFAULT_BOOTSTRAP,
    NoMetadata,
    addresses_or_store,
    bootstrap_of,
    cluster_options,
    kafka_options,
    metadata_of,
    metadata_options,
    quorum_options,
    second_store_of,
    store_of,
    store_option,
)
from stratalog.topic_deletion import delete_named
from stratalog_core.errors import Invalid, NotFound, Unavailable


def _save(directory: Path, port: int) -> None:
    directory.mkdir()
    state = ClusterState(
        bootstrap=f"127.0.0.1:{port}", metadata=f"127.0.0.1:{port + 1}", store=f"{port}", second_store=f"{port}-copy",
        processes=(),
    )  # fmt: skip
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


def _targets(
    options: Callable[[Callable[..., object]], Callable[..., object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., object]:
    """Return a function that parses words and environment, in a directory with clusters in ./data (7000) and ./other (8000)."""
    monkeypatch.chdir(tmp_path)
    for directory, port in (("data", 7000), ("other", 8000)):
        _save(tmp_path / directory, port)
    (tmp_path / "store").mkdir()

    def target(data: Path | None, bootstrap: str = "", metadata: str = "", store: str = "") -> dict[str, object]:
        found: dict[str, object] = {"bootstrap": bootstrap_of(data, bootstrap)}
        for name, ask in (
            ("metadata", lambda: metadata_of(data, metadata)),
            ("store", lambda: store_of(data, store)),
            ("second_store", lambda: second_store_of(data, store)),
            ("reads", lambda: addresses_or_store(data, metadata, store)),
        ):
            try:
                found[name] = ask()
            except Invalid as refused:
                found[name] = refused.message.partition(":")[0]
        return found

    command = click.command()(options(target))

    def parsed(*words: str, **environment: str) -> object:
        for name in ("DATA", "BOOTSTRAP", "METADATA", "STORE"):
            monkeypatch.delenv(f"STRATALOG_{name}", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(f"STRATALOG_{name}", value)
        return command.main(list(words), standalone_mode=False)

    return parsed


def _all_options(command: Callable[..., object]) -> Callable[..., object]:
    return cluster_options(store_option(command))


def test_data_on_the_command_line_is_not_overridden_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _targets(_all_options, tmp_path, monkeypatch)(
        "--data", "other", BOOTSTRAP="production:9092", METADATA="production:9300", STORE="s3://production"
    )
    assert found == {
        "bootstrap": "127.0.0.1:8000", "metadata": ["127.0.0.1:8001"], "store": "8000", "second_store": "8000-copy",
        "reads": ["127.0.0.1:8001"],
    }  # fmt: skip


@pytest.mark.parametrize("environment", [{}, {"DATA": "other"}])
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ("--bootstrap", "production:9092"),
            {
                "bootstrap": "production:9092", "metadata": "no cluster given", "store": "no object store given",
                "second_store": None, "reads": "no cluster given",
            },
        ),
        (
            ("--metadata", "production:9300"),
            {
                "bootstrap": DEFAULT_BOOTSTRAP, "metadata": ["production:9300"], "store": "no object store given",
                "second_store": None, "reads": ["production:9300"],
            },
        ),
    ],
)  # fmt: skip
def test_a_cluster_given_by_addresses_is_not_mixed_with_a_local_one(
    words: tuple[str, ...],
    wanted: dict[str, object],
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither with ./data nor with the one in the environment: the commands would delete topics of one by the other's names."""
    assert _targets(_all_options, tmp_path, monkeypatch)(*words, **environment) == wanted


def test_a_store_on_the_command_line_is_read_alone_whatever_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _targets(metadata_options, tmp_path, monkeypatch)("--store", "store", DATA="other")
    assert isinstance(found, dict)
    assert (found["store"], found["reads"], found["second_store"]) == (str(tmp_path / "store"), [], None)


def test_a_cluster_in_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _targets(_all_options, tmp_path, monkeypatch)(DATA="other")
    assert isinstance(found, dict)
    assert (found["bootstrap"], found["metadata"], found["store"]) == ("127.0.0.1:8000", ["127.0.0.1:8001"], "8000")


def _unavailable(**_: Any) -> None:
    raise Unavailable("Broker transport failure")


def _without_metadata(**_: Any) -> None:
    raise NoMetadata("no metadata leader answered in time")


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


@pytest.mark.parametrize(
    ("role", "remedy"), [("all", "`stratalog up --data data`"), ("broker", "`stratalog cluster start --data data`")]
)
def test_a_failure_names_the_command_that_starts_a_stopped_cluster(
    role: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stratalog.target.DEFAULT_BOOTSTRAP", "127.0.0.1:9")
    kafka_command, quorum_command = kafka_options(_unavailable), quorum_options(_without_metadata)
    with pytest.raises(Unavailable, match=r"; \./data holds no cluster: start one with `stratalog up`, or name one"):
        kafka_command(data=None, bootstrap=None)
    (tmp_path / "data").mkdir()
    process = ProcessState(name="one", role=role, address="127.0.0.1:9")
    save_state(tmp_path / "data", ClusterState(bootstrap="127.0.0.1:9", metadata="127.0.0.1:9", store="", processes=(process,)))
    with pytest.raises(Unavailable, match=rf"^no broker can be reached \(.+\); the cluster is stopped: .+ {remedy}$"):
        kafka_command(data=None, bootstrap=None)
    with pytest.raises(Unavailable, match=rf"^no metadata node can be reached \(.+\); the cluster is stopped: .+ {remedy}$"):
        quorum_command(data=None, metadata=None)
    with pytest.raises(Unavailable, match=r"metadata node can be reached .* is the cluster up\?"):
        quorum_command(data=None, metadata="127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"^Broker transport failure$"):
        metadata_options(_unavailable)(data=None, metadata=None, store="s")


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


def test_a_deletion_of_records_that_was_made_beside_a_failure_is_named() -> None:
    failed: Future[DeletedRecords] = Future()
    failed.set_exception(Unavailable("Broker: Not leader for partition"))
    deleted: Future[DeletedRecords] = Future()
    deleted.set_result(DeletedRecords(7))
    assert low_watermarks({TopicPartition("t", 1): deleted}) == {1: 7}
    with pytest.raises(Unavailable) as failure:
        low_watermarks({TopicPartition("t", 0): failed, TopicPartition("t", 1): deleted})
    assert failure.value.message == "Broker: Not leader for partition; deleted records of t-1"


def test_the_positions_of_lost_partitions_are_not_committed() -> None:
    """They are another member's, which has read on."""
    committed: list[object] = []

    class Client:
        def commit(self, **given: object) -> list[TopicPartition]:
            committed.append(given)
            return []

    class Record:
        partition, offset = staticmethod(lambda: 0), staticmethod(lambda: 5)

    printed = _Printed("t")
    printed.add(cast(Message, Record()))
    printed.forget()
    printed.commit(cast(Consumer, Client()))
    assert committed == []
