"""The command as a user meets it: help, exit codes, messages."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode, exit_code_of
from stratalog_core import errors


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "stratalog", *words], capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_every_command_without_loading_it() -> None:
    program = (
        "import sys; from stratalog.app import stratalog; stratalog(['--help'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    *help_lines, modules = done.stdout.strip().splitlines()
    assert "Run everything in one process." in "\n".join(help_lines)
    assert "confluent_kafka" not in modules.split()


def test_completion_lists_every_command_without_loading_it() -> None:
    """Also the load generator's, which may not be installed."""
    program = (
        "import sys; sys.modules['stratalog_loadgen'] = None; from click.shell_completion import ShellComplete\n"
        "from stratalog.app import stratalog; complete = ShellComplete(stratalog, {}, 'stratalog', '_STRATALOG_COMPLETE')\n"
        "print(*(item.value for item in complete.get_completions([], 'b'))); print(*complete.get_completions([], '--'))\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    commands, options, modules = done.stdout.splitlines()
    assert commands.split() == ["bench", "bookie", "broker"]
    assert options
    assert "stratalog.commands.bookie" not in modules.split()


@pytest.mark.parametrize("words", [("cluster", "start"), ("broker",)])
def test_starts_load_nothing_that_they_do_not_use(words: tuple[str, ...]) -> None:
    program = (
        "import contextlib, sys, stratalog.__main__\n"
        "with contextlib.suppress(SystemExit): stratalog.__main__.main()\n"
        "import stratalog.roles.broker\n"
        "print(*(name for name, module in sys.modules.items() if module))"
    )
    command = [sys.executable, "-c", program, *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert {"boto3", "botocore", "hypothesis", "rich"}.isdisjoint(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("name", stratalog.list_commands(click.Context(stratalog)))
def test_every_command_explains_itself(name: str) -> None:
    done = _run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage:")


def test_wrong_usage_is_2() -> None:
    assert _run("cluster", "start").returncode == ExitCode.USAGE
    assert _run("nonsense").returncode == ExitCode.USAGE


@pytest.mark.parametrize("count", [2, 4, 6])
def test_an_even_number_of_metadata_nodes_is_refused(count: int, tmp_path: Path) -> None:
    # --object-lock without --minio is refused, too, but later: nothing starts if the number is accepted.
    words = ["cluster", "start", "--data", str(tmp_path / "new"), "--object-lock", "--metadata", str(count)]
    done = CliRunner().invoke(stratalog, words)
    assert done.exit_code == ExitCode.USAGE
    assert f"use {count - 1} or {count + 1}" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_missing_cluster_is_4_and_says_what_to_do(tmp_path: Path) -> None:
    done = _run("cluster", "status", "--data", str(tmp_path))
    assert done.returncode == ExitCode.NOT_FOUND
    assert "stratalog cluster start" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_is_not_there_is_3() -> None:
    done = _run("topic", "list", "--bootstrap", "127.0.0.1:9")
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "no broker can be reached (127.0.0.1:9: Connection refused)" in done.stderr
    assert "stratalog doctor" in done.stderr


def test_a_mistyped_command_is_corrected() -> None:
    done = _run("topc", "list")
    assert done.returncode == ExitCode.USAGE
    assert "No such command 'topc'. Did you mean 'topic'?" in done.stderr
    assert "No such command 'xyzzy'.\n" in _run("xyzzy").stderr


@pytest.mark.parametrize(
    ("words", "question"),
    [
        ("metadata remove 2 --metadata 127.0.0.1:9 --timeout 1", "Remove node 2 from the metadata quorum?"),
        ("cluster remove metadata-2 --data .", "Remove metadata-2 from the metadata quorum?"),
    ],
)
def test_a_command_that_cannot_be_undone_asks_on_a_terminal_and_is_refused_elsewhere(words: str, question: str) -> None:
    command = [sys.executable, "-m", "stratalog", *words.split()]
    done = subprocess.run(command, input="y\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.USAGE
    assert question in done.stderr
    assert "give --yes" in done.stderr
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, b"n\n")
        done = subprocess.run(command, stdin=terminal, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert done.returncode == ExitCode.INTERRUPTED
    assert question in done.stderr


@pytest.mark.parametrize("words", [("key", "create", "k", "--keys"), ("up", "--kafka", "127.0.0.1:0", "--data")])
def test_a_path_that_cannot_be_used_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = _run(*words, str(file / "below"))
    assert done.returncode == ExitCode.FAILED
    assert f"stratalog: {file / 'below'}: Not a directory; check the path that was given" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Corrupt("x"), ExitCode.DAMAGED),
        (errors.NoSuchObject("x"), ExitCode.NOT_FOUND),
        (errors.Conflict("x"), ExitCode.CONFLICT),
        (errors.StaleEpoch("x"), ExitCode.CONFLICT),
        (errors.Invalid("x"), ExitCode.USAGE),
        (errors.Refused("x"), ExitCode.USAGE),
        (errors.Overloaded("x"), ExitCode.UNAVAILABLE),
        (errors.OutcomeUnknown("x"), ExitCode.UNAVAILABLE),
        (errors.StorageFailed("x"), ExitCode.FAILED),
    ],
)
def test_exit_codes_tell_what_to_do(error: errors.StratalogError, code: ExitCode) -> None:
    assert exit_code_of(error) is code


@pytest.mark.parametrize(("words", "code"), [(("--help",), 0), (("topic", "unheard-of"), 2)])
def test_output_and_exit_code_come_through_beside_native_threads(words: tuple[str, ...], code: int) -> None:
    """With the S3 client loaded, the interpreter is not taken down: its threads could abort the process."""
    script = f"import sys, obstore; sys.argv = ['stratalog', *{words!r}]; from stratalog.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert "Usage" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["up", "topic list", "tier status", "cluster start", "cluster status", "doctor"])
def test_the_environment_names_the_directory_for_each_command(name: str) -> None:
    (option,) = [each for each in dict(_leaves(stratalog))[name].params if each.name == "data"]
    assert option.envvar == "STRATALOG_DATA"


@pytest.mark.parametrize("seconds", ["-1", "soon"])
def test_a_time_limit_is_a_number_that_is_not_negative(seconds: str) -> None:
    for name, command in _leaves(stratalog):
        if not name.startswith("bench") and any("--timeout" in option.opts for option in command.params):
            done = CliRunner().invoke(stratalog, [*name.split(), f"--timeout={seconds}"])
            assert (done.exit_code, "--timeout" in done.stderr) == (ExitCode.USAGE, True), name


_NOT_FOR_PROGRAMS = {"up", "tiering", "consume", "serve-archive"}
"""Commands that run until they are stopped; ``consume --json`` prints a document for each record."""


def _leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _leaves(found, (*path, name))


_COMMANDS = {name: command for name, command in _leaves(stratalog) if name.partition(" ")[0] not in _NOT_FOR_PROGRAMS}


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_has_an_answer_for_programs(name: str) -> None:
    assert "--json" in {option for parameter in _COMMANDS[name].params for option in parameter.opts}


_GROUPS = sorted({name.rpartition(" ")[0] for name in _COMMANDS} - {""})


@pytest.mark.parametrize("name", _GROUPS)
def test_the_help_of_a_group_cuts_no_description(name: str) -> None:
    usage, *lines = CliRunner().invoke(stratalog, [*name.split(), "--help"], terminal_width=80).stdout.splitlines()
    assert usage.startswith("Usage: ")
    assert lines
    assert [line for line in lines if line.endswith("...")] == []


_NOT_UNDONE = {"group reset", "metadata remove", "metadata restore", "txn abort", "txn find-hanging"}
"""Commands beside ``delete`` whose effect cannot be undone."""


@pytest.mark.parametrize("name", sorted(_NOT_UNDONE | {name for name in _COMMANDS if " delete" in name}))
def test_what_destroys_asks_first(name: str) -> None:
    assert "--yes" in {option for parameter in _COMMANDS[name].params for option in parameter.opts}


_WAITING = {
    name: [parameter for parameter in command.params if parameter.name in ("wait", "no_wait")]
    for name, command in _COMMANDS.items()
    if any(parameter.name in ("wait", "no_wait") for parameter in command.params)
}


@pytest.mark.parametrize("name", sorted(_WAITING))
def test_what_can_wait_has_both_options(name: str) -> None:
    assert [(each.opts, each.secondary_opts) for each in _WAITING[name]] == [(["--wait"], ["--no-wait"])]


class _NotInstalled:
    """Finds no module of the load generator, as on a machine where it is not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "stratalog_loadgen":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_bench_without_the_load_generator_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("stratalog_loadgen")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NotInstalled(), *sys.meta_path])
    result = CliRunner().invoke(stratalog, ["bench", "produce"])
    assert result.exit_code == ExitCode.USAGE
    assert "pip install 'stratalog[bench]'" in result.output
