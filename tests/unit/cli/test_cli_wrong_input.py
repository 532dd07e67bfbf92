"""Wrong input and broken streams end with one line and an exit code, never with a traceback or a crash of a native library."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ProfileNotFound
from click.testing import CliRunner

from stratalog.app import stratalog
from stratalog.buckets import s3_client
from stratalog.commands.produce import _headers, _records
from stratalog.exit_codes import ExitCode
from stratalog.target import name_values
from stratalog_core.errors import Invalid
from stratalog_tiering.store import s3_location

_NOWHERE = ("--bootstrap", "127.0.0.1:9")
_BIG = str(2**31)


def _shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -m stratalog {line}'
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    "words",
    [
        ("topic", "create", "t", "--replication-factor", "40000"),
        ("topic", "create", "t", "--replication-factor", "0"),
        ("topic", "create", "t", "--config", "=5"),
        ("topic", "config", "t", "--set", "=5"),
        ("topic", "config", "t", "--unset", ""),
        ("topic", "delete-records", "t", "--before", "0", "--partition", _BIG),
        ("topic", "delete-records", "t", "--before", "0", "--partition", "-1"),
        ("group", "describe", ""),
        ("group", "delete", "g", ""),
        ("group", "reset", "", "t", "--to", "earliest"),
        ("group", "reset", "g", "t", "--to", "earliest", "--partition", _BIG),
        ("group", "reset", "g", "t", "--to", "earliest", "--partition", "-1"),
        ("group", "delete-offsets", "g", "t", "--partition", _BIG),
        ("group", "delete-offsets", "", "t"),
        ("consume", "t", "--group", ""),
        ("consume", "t", "--partition", _BIG),
        ("produce", "t", "--value", "v", "--partition", _BIG),
        ("produce", "t", "--value", "v", "--partition", "-1"),
        ("txn", "describe", ""),
        ("txn", "abort", ""),
    ],
)
def test_a_value_that_no_client_takes_is_wrong_usage(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(stratalog, [*words, *_NOWHERE])
    if isinstance(done.exception, Invalid):
        return
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == ExitCode.USAGE
    assert "Error: Invalid value" in done.stderr


def test_a_value_without_a_name_is_refused() -> None:
    with pytest.raises(Invalid, match="'=5' is not NAME=VALUE"):
        name_values(["a=1", "=5"])


@pytest.mark.parametrize(
    "line",
    ["topic create $'\\xff'", "group describe $'\\xff'", "produce t --value v --header $'\\xff=' --bootstrap 127.0.0.1:9"],
)
def test_an_argument_that_is_no_text_is_wrong_usage(line: str) -> None:
    done = _shell(line)
    assert done.returncode == ExitCode.USAGE
    assert "Traceback" not in done.stderr
    assert "is not valid UTF-8" in done.stderr


def test_keys_and_values_may_be_any_bytes() -> None:
    (record,) = _records("v\udcff", tombstone=False, key="k\udcfe", key_separator=None)
    assert record == (b"k\xfe", b"v\xff")
    assert _headers(("h=\udcfd",)) == [("h", b"\xfd")]


@pytest.mark.parametrize("words", ["group delete g --bootstrap 127.0.0.1:9 <&-", "topic delete t --bootstrap 127.0.0.1:9 <&-"])
def test_a_closed_input_is_no_terminal(words: str) -> None:
    done = _shell(words)
    assert done.returncode == ExitCode.USAGE
    assert "Standard input is not a terminal: give --yes to confirm" in done.stderr


def test_a_closed_output_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "k.key").touch()
    done = _shell(f"key list --keys {tmp_path} >&-")
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_is_full_is_one_line(tmp_path: Path) -> None:
    done = _shell(f"key list --json --keys {tmp_path} > /dev/full")
    assert done.returncode == ExitCode.FAILED
    assert done.stderr == "stratalog: No space left on device; free disk space, or name another path\n"


@pytest.mark.parametrize("address", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_an_address_that_this_machine_does_not_have_is_one_line(address: str, tmp_path: Path) -> None:
    done = _shell(f"up --data {tmp_path} --kafka {address}", STRATALOG_HTTP_LISTEN="127.0.0.1:0")
    assert done.returncode == ExitCode.FAILED
    assert "Traceback" not in done.stderr
    assert "check the addresses to listen on" in done.stderr.splitlines()[-1]


def test_an_output_that_is_closed_early_ends_the_command_silently(tmp_path: Path) -> None:
    for number in range(5000):
        (tmp_path / f"a-key-with-a-long-name-{number}.key").touch()
    done = _shell(f"key list --json --keys {tmp_path} | head -1")
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_credentials_that_boto3_does_not_find_are_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(Invalid, match="no-such-profile") as refused:
        s3_client(s3_location("s3://b?endpoint=http://127.0.0.1:9"), None)
    assert isinstance(refused.value.__cause__, ProfileNotFound)


def test_records_are_asked_for_on_a_terminal_only() -> None:
    program = "from stratalog.commands.produce import _records; print(list(_records(None, False, None, None)))"
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, b"one\n\x04")
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stdin=terminal, capture_output=True, text=True, timeout=60, check=True)
        assert (done.stdout, done.stderr) == ("[(None, b'one')]\n", "one record per line; Ctrl-D ends\n")
        done = subprocess.run(command, input="one\n", capture_output=True, text=True, timeout=60, check=True)
        assert (done.stdout, done.stderr) == ("[(None, b'one')]\n", "")
    finally:
        os.close(keyboard)
        os.close(terminal)
