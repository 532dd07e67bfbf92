"""Parameters that several commands have. Kafka's client library ends the process for some of the values that they refuse."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from typing import Any, Final, TypeVar

import click

from stratalog.moments import parse_moment
from stratalog_core.errors import Invalid

Command = TypeVar("Command", bound=Callable[..., Any])
_PARTITION_MAX: Final = 2**31 - 1
TIMES: Final = "2013-07-04 (UTC), 2013-07-04T12:00+02:00, 15m (ago), or milliseconds since 1970"
_MILLISECOND_DIGITS: Final = 13
"""Of the milliseconds since 1970 from 2001 until 2286. Dates and seconds are shorter, microseconds longer."""


class Integer(click.IntRange):
    """An integer, of a range if limits are given. Click calls it "integer range" in help and errors."""

    name = "integer"


class Number(click.FloatRange):
    """A number, of a range if limits are given. Click calls it "float range"."""

    name = "number"


PARTITION: Final = Integer(min=0)


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


def moment_ms(text: str) -> int:
    """Return milliseconds since 1970 for a time in one of the forms of ``TIMES``. Raises ``Invalid``.

    Of the numbers, only 0 and those of 13 digits are times: others are dates without hyphens, years, or other units.
    """
    if re.fullmatch(r"-?[0-9]{1,18}", text) and text != "0" and not re.fullmatch(f"[0-9]{{{_MILLISECOND_DIGITS}}}", text):
        raise Invalid(f"{text!r} is not a time: {_remedy(text)}; milliseconds since 1970 have {_MILLISECOND_DIGITS} digits")
    return parse_moment(text, now_ms=time.time_ns() // 1_000_000)


def _remedy(number: str) -> str:
    if re.fullmatch("[0-9]{8}", number):
        with suppress(ValueError):
            return f"for the day give {date.fromisoformat(number)}"
    if re.fullmatch("[0-9]{10}", number):
        return f"for seconds since 1970 give {number}000"
    return "give 2013-07-04 or 2013-07-04T12:00:00Z"


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
