"""The common parts of commands that delete: ``--yes``, the confirmation, and waiting until brokers have deleted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import click

from stratalog import kafka
from stratalog.output import print_done
from stratalog_core.errors import Invalid

Command = TypeVar("Command", bound=Callable[..., Any])
Delete = Callable[[list[str]], Mapping[str, Future[None]]]
"""An admin client's call that deletes things by name."""


def yes_option(command: Command) -> Command:
    """Add ``--yes``, for :func:`confirm`."""
    return click.option("--yes", is_flag=True, help="Do not ask for confirmation.")(command)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on stderr unless ``yes``. Raises ``click.Abort`` if the answer is no, ``Invalid`` if stdin is not a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Invalid(f"{question} There is no terminal to ask on: give --yes to confirm")
    click.confirm(question, abort=True, err=True)


def delete_named(names: Sequence[str], contents: str, delete: Delete, *, yes: bool, as_json: bool) -> None:
    """Confirm, delete the things of these names with their ``contents``, and print the names once all are deleted."""
    listed = ", ".join(names)
    confirm(f"Delete {listed} and all their {contents}?", yes=yes)
    for name, future in delete(list(names)).items():
        kafka.only({name: future})
    print_done({"deleted": list(names)}, f"deleted {listed}", as_json=as_json)
