"""The option of commands that request work which the cluster then does: ``--wait/--no-wait``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def wait_option(until: str, *, default: bool) -> Callable[[Command], Command]:
    """Return a decorator that adds ``--wait/--no-wait``. With ``--no-wait`` a command returns when the work is requested."""
    return click.option(
        "--wait/--no-wait", default=default, show_default=True, help=f"Wait until {until}, or return when this is requested."
    )
