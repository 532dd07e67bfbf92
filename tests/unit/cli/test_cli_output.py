"""Output of commands, and confluent-kafka's errors translated to ours."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import cast

import click
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from stratalog.output import human_bytes, print_listing, print_rows, progress_bar
from stratalog_core.errors import Conflict, Invalid, NotFound, StratalogError, Unavailable
from stratalog_core.kafka_clients import as_ours, list_offsets, translated

ROWS = [{"name": "a", "cold_bytes": 1536, "last_error": None}, {"name": "b", "cold_bytes": 0, "last_error": "x" * 100}]
COLUMNS = ("name", "cold_bytes", "last_error")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 1024**2, "3.0 MiB"), (2**60, "1024.0 PiB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_a_listing_is_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    print_listing("rows", ROWS, COLUMNS, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"rows": ROWS}


def test_a_listing_is_a_table_for_people_and_one_line_each_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_listing("rows", ROWS, COLUMNS, as_json=False)
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "cold", "bytes", "last", "error"]
    assert first.split() == ["a", "1.5", "KiB", "-"]
    assert second.split() == ["b", "0", "B", "x" * 100]


def _on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")


def test_only_long_text_is_folded_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _on_terminal(monkeypatch, 50)
    print_listing("rows", ROWS, COLUMNS, as_json=False)
    heading, first, second, *rest = click.unstyle(capsys.readouterr().out).splitlines()
    assert heading.split() == ["name", "cold", "bytes", "last", "error"]
    assert (first.split(), second.split()[:3]) == (["a", "1.5", "KiB", "-"], ["b", "0", "B"])
    assert "".join([second.split()[3], *(line.strip() for line in rest)]) == "x" * 100


def test_a_table_that_is_wider_than_the_terminal_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _on_terminal(monkeypatch, 40)
    columns = ("topic", "partition", "log_start_offset", "cold_end_offset")
    print_listing(
        "rows", [{"topic": "events", "partition": 0, "log_start_offset": 0, "cold_end_offset": 7}], columns, as_json=False
    )
    assert click.unstyle(capsys.readouterr().out).splitlines() == [
        "topic   partition  log start offset  cold end offset",
        "events          0                 0                7",
    ]


def test_a_line_in_a_pipe_is_not_padded_and_an_empty_column_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"check": "store", "detail": "x" * 400, "remedy": ""}, {"check": "disk", "detail": "ok", "remedy": ""}]
    print_listing("rows", rows, ("check", "detail", "remedy"), as_json=False)
    assert capsys.readouterr().out.splitlines() == ["check  detail", "store  " + "x" * 400, "disk   ok"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, NotFound),
        (KafkaError.TOPIC_ALREADY_EXISTS, Conflict),
        (KafkaError._ALL_BROKERS_DOWN, Unavailable),
        (KafkaError.INVALID_CONFIG, Invalid),
    ],
)
def test_kafka_errors_become_ours(code: int, kind: type[StratalogError]) -> None:
    assert type(as_ours(KafkaError(code))) is kind
    with pytest.raises(kind), translated():
        raise KafkaException(KafkaError(code))


def test_what_clients_choose_is_no_markup_and_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["[/closed]", "[bold]b[/bold]", "\x1b]0;owned\x07é"]
    print_rows([{"key": key} for key in keys], ("key",), title="[x] of [/y]")
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines] == [
        "[x] of [/y]", "key", "[/closed]", "[bold]b[/bold]", "\\x1b]0;owned\\x07é",
    ]  # fmt: skip


def test_progress_is_not_written_to_a_file_although_colors_are_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar() as progress:
        progress.advance(progress.add_task("working", total=1))
    assert capsys.readouterr().err == ""


def test_offsets_that_are_not_answered_are_unavailable() -> None:
    class Client:
        def list_offsets(self, wanted: dict[TopicPartition, OffsetSpec], **_: object) -> dict[TopicPartition, Future[None]]:
            return {place: Future() for place in wanted}

    with pytest.raises(Unavailable, match="no answer within 0 s"):
        list_offsets(lambda: cast(AdminClient, Client()), {TopicPartition("t", 0): OffsetSpec.latest()}, 0.1)
