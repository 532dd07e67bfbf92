"""Commands whose brokers do not answer, or stop to answer, end with an error in a bounded time."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, Producer, TopicPartition

from stratalog import kafka, kafka_requests
from stratalog.app import stratalog
from stratalog.commands import txn
from stratalog.commands.consume import _records
from stratalog.commands.produce import _Sender
from stratalog.exit_codes import ExitCode
from stratalog.hanging_transactions import OpenTransaction
from stratalog_core.errors import Conflict, Unavailable

NOWHERE = "127.0.0.1:9"


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kafka, kafka_requests):
        monkeypatch.setattr(module, "TIMEOUT_S", 1.0)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "words",
    [
        ("txn", "list"),
        ("txn", "describe", "t"),
        ("txn", "find-hanging"),
        ("group", "delete-offsets", "g", "t", "--partition", "0", "--yes"),
        ("produce", "t", "--value", "v"),
        ("topic", "list"),
    ],
)
@pytest.mark.timeout(60)
def test_a_broker_that_does_not_answer_is_not_waited_for(words: tuple[str, ...], silent: str) -> None:
    done = CliRunner().invoke(stratalog, [*words, "--bootstrap", silent])
    assert isinstance(done.exception, Unavailable), done.output


@pytest.mark.timeout(60)
def test_records_without_a_broker_are_not_waited_for() -> None:
    """The client library would try for minutes."""
    done = CliRunner().invoke(stratalog, ["produce", "t", "--bootstrap", NOWHERE], input="1\n2\n")
    assert isinstance(done.exception, Unavailable)
    assert f"no broker can be reached ({NOWHERE}: Connection refused)" in done.exception.message


@pytest.mark.timeout(60)
def test_a_reader_whose_brokers_are_gone_ends() -> None:
    client = Consumer({"bootstrap.servers": NOWHERE, "group.id": "g", "log_level": 0, "enable.partition.eof": True})
    try:
        client.assign([TopicPartition("t", 0, 0)])
        check = partial(kafka.check_reachable, kafka.admin(NOWHERE).list_topics)
        with pytest.raises(Unavailable):
            list(_records(client, {0}, check, count=None, follow=False))
    finally:
        client.close()


def test_a_signal_is_handled_while_a_producer_waits_for_acknowledgements() -> None:
    """Python handles signals between two calls of the client library only."""
    limits: list[float] = []

    class Client:
        def flush(self, timeout: float) -> int:
            limits.append(timeout)
            if len(limits) == 3:
                raise KeyboardInterrupt
            return 1

        list_topics: Callable[..., None] = staticmethod(lambda timeout: None)

    sender = _Sender(cast(Producer, Client()), "t", -1, [], 0)
    with pytest.raises(KeyboardInterrupt):
        sender.send_all([])
    assert max(limits) <= 1


def test_the_other_hanging_transactions_are_aborted_if_one_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [OpenTransaction("t", index, index, 0, 0, 5, 0, NOWHERE) for index in range(3)]

    async def abort(transaction: OpenTransaction) -> None:
        if transaction.partition == 1:
            raise Conflict("the transaction of producer 1 in t-1 has already ended")

    monkeypatch.setattr(txn, "abort_hanging", abort)
    aborted: Any = asyncio.run(txn._abort(found))
    assert [each.partition for each in aborted] == [0, 2]
    assert "producer 1 in t-1 has already ended" in capsys.readouterr().err


def _heed_ctrl_c() -> None:
    """The tests may run in the background of a script, whose shell ignores Ctrl-C for them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    "words", ["topic list", "topic describe t", "consume t", "produce t --value v", "group delete g --yes"]
)
@pytest.mark.timeout(60)
def test_ctrl_c_ends_a_command_that_waits_for_a_broker(words: str) -> None:
    """The client library does not return to Python before its own time-out of 15 seconds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-m", "stratalog", *words.split(), "--bootstrap", f"127.0.0.1:{server.getsockname()[1]}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=_heed_ctrl_c) as process:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1)
                    began = time.monotonic()
                    process.send_signal(signal.SIGINT)
                    assert process.wait(60) == ExitCode.INTERRUPTED
                    assert time.monotonic() - began < 8
            finally:
                process.kill()
