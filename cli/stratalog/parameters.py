"""Parameters that several commands have. Kafka's client library ends the process for some of the values that they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
PARTITION: Final = click.IntRange(min=0)
_PARTITION_MAX: Final = 2**31 - 1


def valid_partition(context: click.Context, parameter: click.Parameter, given: Any) -> Any:
    """Return a partition number or several. Raises ``BadParameter`` for one that Kafka's protocol cannot express."""
    for number in given if isinstance(given, tuple) else (given,):
        if number is not None and number > _PARTITION_MAX:
            raise click.BadParameter(f"{number} is not a partition; maximum is {_PARTITION_MAX}", context, parameter)
    return given


def partitions_option(text: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the repeatable option ``--partition``."""
    return click.option("--partition", "partitions", multiple=True, type=PARTITION, callback=valid_partition, help=text)


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
