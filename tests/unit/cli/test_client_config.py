"""Settings of Kafka clients in files of Java properties, which keep secrets out of a process's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from stratalog.app import stratalog
from stratalog.client_config import client_config, parse_properties
from stratalog_core.errors import Invalid

FILE = "sasl.username=reader\nsasl.password = a b=c:d \n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The examples of java.util.Properties.
        ("Truth = Beauty\n Truth2:Beauty\nTruth3\t\t\t:Beauty", {"Truth": "Beauty", "Truth2": "Beauty", "Truth3": "Beauty"}),
        (
            "fruits    apple, banana, pear, \\\n          cantaloupe, \\\n   mango",
            {"fruits": "apple, banana, pear, cantaloupe, mango"},
        ),
        ("cheeses", {"cheeses": ""}),
        ("# a = b\\\n  ! c = d\n\n \t\ne = f", {"e": "f"}),
        ("a\\ b\\=c\\:d = \\ e", {"a b=c:d": " e"}),
        ("a = C:\\\\keys\\\\\nb = 2", {"a": "C:\\keys\\", "b": "2"}),
        ("a = \\u00e9\\t\\z", {"a": "é\tz"}),
        ("a=1\r\nb=2\ra=3", {"a": "3", "b": "2"}),
        ("a === ", {"a": "== "}),
        ("a = b \\\n # no comment", {"a": "b # no comment"}),
        ("a = b\\", {"a": "b"}),
        ("", {}),
    ],
)
def test_a_file_is_read_as_java_reads_it(text: str, expected: dict[str, str]) -> None:
    assert parse_properties(text) == expected


TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=8)
"""Java stores other characters as surrogates."""


@given(st.dictionaries(TEXT.filter(bool), TEXT, max_size=4))
def test_what_is_written_as_java_stores_it_is_read_back(settings: dict[str, str]) -> None:
    def escaped(text: str) -> str:
        return "".join(each if each.isalnum() and each.isascii() else f"\\u{ord(each):04x}" for each in text)

    assert parse_properties("".join(f"{escaped(name)}={escaped(text)}\n" for name, text in settings.items())) == settings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a=1\n=2", "client.properties: line 2 has no name before its value"),
        (b"a=\\u12", r"client.properties: line 1 has \\u without four hexadecimal digits"),
        (b"a=\xff", "client.properties is not text in UTF-8"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "client.properties"
    file.write_bytes(content)
    with pytest.raises(Invalid, match=message) as refused:
        client_config("--to-config", (), file)
    assert refused.value.message.startswith("--to-config-file ")


def test_an_option_wins_over_the_file_and_a_secret_in_an_option_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "client.properties"
    file.write_text(FILE)
    assert client_config("--to-config", (), file) == {"sasl.username": "reader", "sasl.password": "a b=c:d "}
    assert client_config("--to-config", ("sasl.username=writer", "linger.ms=5"), file)["sasl.username"] == "writer"
    assert capsys.readouterr().err == ""
    assert client_config("--to-config", ("sasl.password=hidden",), file)["sasl.password"] == "hidden"
    warning = capsys.readouterr().err
    assert "--to-config sasl.password" in warning
    assert "--to-config-file" in warning
    assert "hidden" not in warning


@pytest.mark.parametrize(
    "words",
    [
        "replay t --store STORE --to 127.0.0.1:1 --to-config-file",
        "backfill --topic t --from-kafka 127.0.0.1:1 --store STORE --metadata 127.0.0.1:1 --from-config-file",
    ],
)
def test_jobs_read_the_file_before_they_ask_any_broker(tmp_path: Path, words: str) -> None:
    file = tmp_path / "client.properties"
    file.write_text("a=\\u12")
    command = ["job", *words.replace("STORE", str(tmp_path)).split(), str(file)]
    done = CliRunner().invoke(stratalog, command)
    assert isinstance(done.exception, Invalid)
    assert f"{command[-2]} {file}: line 1 has" in done.exception.message
