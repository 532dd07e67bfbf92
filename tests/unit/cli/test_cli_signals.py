"""A command that SIGTERM or Ctrl-C ends cleans up first, and its exit code says which of them it was."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from stratalog.exit_codes import ExitCode

_COMMAND = """
import asyncio, signal, sys, threading
import click
import stratalog.__main__

@click.command()
@click.argument("how")
def wait(how):
    try:
        if "asyncio" in how:
            asyncio.run(forever())
        print("waits", flush=True)
        threading.Event().wait()
    finally:
        if "again" in how:
            print("waits", flush=True)
            threading.Event().wait(0.5)
        print("cleaned up", flush=True)

async def forever():
    print("waits", flush=True)
    await asyncio.Event().wait()

in_background = "background" in sys.argv[1]
signal.signal(signal.SIGINT, signal.SIG_IGN if in_background else signal.default_int_handler)
stratalog.__main__.main(wait)
"""


@pytest.mark.parametrize("how", ["threads", "asyncio"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGINT, ExitCode.INTERRUPTED)])
def test_a_command_that_is_ended_cleans_up(number: signal.Signals, code: ExitCode, how: str) -> None:
    assert _ended_by(number, how) == (code, "cleaned up\n", "\n")


@pytest.mark.parametrize("how", ["threads", "asyncio"])
def test_sigterm_ends_a_command_in_the_background_of_a_script(how: str) -> None:
    """The shell ignores Ctrl-C for it."""
    assert _ended_by(signal.SIGTERM, f"{how} background") == (ExitCode.TERMINATED, "cleaned up\n", "\n")


def test_a_second_sigterm_does_not_end_the_cleaning_up() -> None:
    """`timeout` sends the signal to the command and to its own process group."""
    assert _ended_by(signal.SIGTERM, "threads again") == (ExitCode.TERMINATED, "cleaned up\n", "\n")


def test_a_second_ctrl_c_ends_the_cleaning_up_without_a_traceback() -> None:
    assert _ended_by(signal.SIGINT, "threads again") == (ExitCode.INTERRUPTED, "", "\n")


def _ended_by(number: signal.Signals, how: str) -> tuple[int, str, str]:
    """Return the exit code, and what the command printed after the signal, or "again" during its cleaning up after two."""
    command = [sys.executable, "-c", _COMMAND, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for _ in range(2 if "again" in how else 1):
                assert process.stdout.readline() == "waits\n"
                process.send_signal(number)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, output, errors
