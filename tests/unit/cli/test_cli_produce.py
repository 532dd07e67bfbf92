"""What ``stratalog produce`` reads from standard input, and what it reports of the lines before a malformed one."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, Producer

from stratalog.commands import produce
from stratalog_core.errors import Invalid, NotFound


class _Client:
    """A producer whose records are acknowledged by ``flush``, each with ``failure``."""

    def __init__(self, failure: KafkaError | None = None) -> None:
        self.sent: list[tuple[bytes | None, bytes | None]] = []
        self._failure = failure
        self._waiting: list[Callable[..., None]] = []

    def produce(self, topic: str, *, value: bytes | None, key: bytes | None, on_delivery: Any, **_: Any) -> None:
        self.sent.append((key, value))
        self._waiting.append(on_delivery)

    def poll(self, timeout: float) -> int:
        return 0

    def flush(self, timeout: float) -> int:
        while self._waiting:
            self._waiting.pop()(self._failure, None)
        return 0

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(topics={"events": SimpleNamespace(partitions={0: None, 1: None})})


def _sent(monkeypatch: pytest.MonkeyPatch, client: _Client, text: str, separator: str) -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    records = produce._records(None, False, None, separator)
    return produce._Sender(cast(Producer, client), "events", -1, [], 0).send_all(records)


def test_the_lines_before_a_malformed_one_are_sent_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client()
    with pytest.raises(Invalid) as refused:
        _sent(monkeypatch, client, "a:b\nno key\nc:d\n", ":")
    assert refused.value.message.startswith("line 2, 'no key', has no separator ':'")
    assert refused.value.message.endswith("; acknowledged before it: 1 record")
    assert client.sent == [(b"a", b"b")]


def test_a_tab_can_be_written_as_in_other_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client()
    assert _sent(monkeypatch, client, "a\tb\n", "\\t") == 1
    assert client.sent == [(b"a", b"b")]


def test_a_record_that_is_too_large_names_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid, match=r"too large for topic 'events'.*max\.message\.bytes"):
        _sent(monkeypatch, _Client(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)), "a:b\n", ":")


def test_records_that_are_not_acknowledged_are_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(produce, "_SILENT_S", 0.0)
    client, left = _Client(), iter([1, 1, 1, 0])
    monkeypatch.setattr(client, "flush", lambda timeout: next(left))
    _sent(monkeypatch, client, "a:b\n", ":")
    assert capsys.readouterr().err.count("still trying: `stratalog doctor` names the cause") == 1


def test_a_new_topic_is_named_and_an_unknown_partition_refused(capsys: pytest.CaptureFixture[str]) -> None:
    client = cast(Producer, _Client())
    produce._check_topic(client, "evnts", None)
    assert "topic 'evnts' does not exist" in capsys.readouterr().err
    produce._check_topic(client, "events", 1)
    assert not capsys.readouterr().err
    with pytest.raises(NotFound, match="no partition 2; it has 2"):
        produce._check_topic(client, "events", 2)
