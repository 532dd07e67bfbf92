"""``stratalog up``: the first record within seconds, data that survives a kill, a graceful stop; then its archive."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message
from kafka import KafkaConsumer

from stratalog.exit_codes import ExitCode

pytestmark = pytest.mark.integration
CONSUME_S = 120.0
COMMAND_S = 120.0
NUMBERS = 3_000


@contextmanager
def _up(data: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "stratalog", "up", "--data", str(data), "--kafka", "127.0.0.1:0"]
    with (
        (data.parent / "log").open("a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as node,
    ):
        try:
            assert node.stdout is not None
            line = node.stdout.readline()
            assert "serves Kafka clients at" in line, (data.parent / "log").read_text()
            yield node
        finally:
            node.kill()


def _stratalog(data: Path, *words: str, expect: int = 0, stdin: str | None = None) -> str:
    command = [sys.executable, "-m", "stratalog", *words, "--data", str(data)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == expect, done.stderr
    return done.stdout


def test_first_record_offload_and_restart(tmp_path: Path, kcat: str) -> None:
    data = tmp_path / "data"
    with _up(data) as node:
        _stratalog(data, "produce", "greetings", "--value", "hello")
        assert _stratalog(data, "consume", "greetings") == "hello\n"
        _stratalog(data, "up", expect=ExitCode.CONFLICT)
        _stratalog(data, "tier", "offload", "greetings", "--wait", "--delete-hot")
        _stratalog(data, "produce", "greetings", "--value", "again")
        node.send_signal(signal.SIGKILL)
        node.wait()
    with _up(data) as node:
        assert _stratalog(data, "consume", "greetings") == "hello\nagain\n"
        status = json.loads(_stratalog(data, "tier", "status", "greetings", "--json"))["partitions"]
        assert status[0]["cold_end_offset"] in (1, 2), "the kill has sealed the second record's ledger, which is offloaded, too"
        _stratalog(data, "produce", "numbers", stdin="".join(f"{number}\n" for number in range(NUMBERS)))
        _stratalog(data, "tier", "offload", "numbers", "--wait")
        node.send_signal(signal.SIGTERM)
        assert node.wait(CONSUME_S) == 0
    _check_archive(tmp_path, kcat)


def _check_archive(directory: Path, kcat: str) -> None:
    """Consume the store's history without the node: all of it, then by a group over a restart."""
    expected = sorted(str(number).encode() for number in range(NUMBERS))
    with _serve_archive(directory) as (server, bootstrap):
        assert sorted(_consumed(bootstrap, "everything", "numbers", NUMBERS)) == expected
        assert _consumed(bootstrap, "everything", "greetings", 1) == [b"hello"]
        command = [kcat, "-b", bootstrap, "-C", "-t", "numbers", "-e", "-q"]
        printed = subprocess.run(command, capture_output=True, check=True, timeout=CONSUME_S).stdout
        assert sorted(printed.split()) == expected
        waits: dict[str, Any] = {"auto_offset_reset": "earliest", "consumer_timeout_ms": CONSUME_S * 1000}
        reader = KafkaConsumer("numbers", bootstrap_servers=bootstrap, **waits)
        assert sorted(message.value for message in islice(reader, NUMBERS)) == expected
        reader.close()
        first = _consumed(bootstrap, "in-two-steps", "numbers", NUMBERS // 2)
        server.send_signal(signal.SIGTERM)
        assert server.wait(CONSUME_S) == 0
    with _serve_archive(directory) as (server, bootstrap):
        second = _consumed(bootstrap, "in-two-steps", "numbers", NUMBERS - len(first))
        assert sorted(first + second) == expected


@contextmanager
def _serve_archive(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    options = ["--store", str(directory / "data" / "store"), "--positions", str(directory / "positions")]
    command = [sys.executable, "-m", "stratalog", "serve-archive", "--listen", "127.0.0.1:0", *options]
    with (
        (directory / "log").open("a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            found = re.search(r"find the archive at (\S+);", server.stdout.readline())
            assert found is not None, (directory / "log").read_text()
            yield server, found[1]
        finally:
            server.kill()


def _consumed(bootstrap: str, group: str, topic: str, count: int) -> list[bytes]:
    """Consume ``count`` records with a group and commit its position after them."""
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = Consumer(settings)
    try:
        consumer.subscribe([topic])
        messages: list[Message] = []
        until = time.monotonic() + CONSUME_S
        while len(messages) < count:
            assert time.monotonic() < until, f"{len(messages)} of {count} records came"
            messages += consumer.consume(count - len(messages), 1.0)
        consumer.commit(asynchronous=False)
        values = [message.value() for message in messages if not message.error()]
        assert len(values) == count
        return [value for value in values if isinstance(value, bytes)]
    finally:
        consumer.close()
