"""Parameters that several commands have. Kafka's client library ends the process for some of the values that they refuse."""

from __future__ import annotations

from typing import Any, Final

import click

PARTITION: Final = click.IntRange(0, 2**31 - 1)


def valid_name(context: click.Context, parameter: click.Parameter, given: Any) -> Any:
    """Return a name or several. Raises ``BadParameter`` for one that is empty or not UTF-8."""
    for name in given if isinstance(given, tuple) else (given,):
        if name == "":
            raise click.BadParameter("it is empty", context, parameter)
        if name is not None and not is_text(name):
            raise click.BadParameter(f"{name!r} is not valid UTF-8", context, parameter)
    return given


def is_text(argument: str) -> bool:
    """Return whether an argument is UTF-8. The client library crashes on a name that is not."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def argument_bytes(argument: str) -> bytes:
    """Return the bytes of an argument as they were given, also if they are not UTF-8."""
    return argument.encode("utf-8", "surrogateescape")
