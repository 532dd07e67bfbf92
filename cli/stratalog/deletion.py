"""The common parts of commands whose effect cannot be undone: ``--yes`` and the confirmation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from stratalog_core.errors import Invalid

Command = TypeVar("Command", bound=Callable[..., Any])


def yes_option(command: Command) -> Command:
    """Add ``--yes``, for :func:`confirm`."""
    return click.option("--yes", is_flag=True, help="Do not ask for confirmation.")(command)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on stderr unless ``yes``. Raises ``click.Abort`` if the answer is no, ``Invalid`` if stdin is not a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Invalid(f"{question} Standard input is not a terminal: give --yes to confirm")
    click.confirm(question, abort=True, err=True)
