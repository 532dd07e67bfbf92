"""The options of commands that wait: ``--wait/--no-wait`` for work that the cluster does, and ``--timeout``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from stratalog.parameters import Number

Command = TypeVar("Command", bound=Callable[..., Any])


def wait_option(until: str, *, default: bool) -> Callable[[Command], Command]:
    """Return a decorator that adds ``--wait/--no-wait``. With ``--no-wait`` a command returns when the work is requested."""
    text = f"Wait until {until}, or return as soon as it is requested."
    return click.option("--wait/--no-wait", default=default, show_default=True, help=text)


def timeout_option(default_s: float, text: str = "Seconds to wait.") -> Callable[[Command], Command]:
    """Return a decorator that adds ``--timeout``, a number of seconds."""
    limit = Number(min=0)
    return click.option("--timeout", "timeout_s", type=limit, default=default_s, show_default=True, help=text)
