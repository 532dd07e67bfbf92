"""Reads the headers of confluent-kafka's messages, for the command line and for Spark. Does not import the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Final, Protocol

from stratalog_core.errors import Corrupt

Headers = Sequence[tuple[str, bytes | None]]


class MessageWithHeaders(Protocol):
    """The part of confluent-kafka's ``Message`` that is read here."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def headers(self) -> Any: ...


def headers_of(message: MessageWithHeaders, remedy: str) -> Headers:
    """Return the message's headers. Raises ``Corrupt``, which ends with ``remedy``, if the name of one is not UTF-8."""
    try:
        return _call_headers(message) or ()
    except SystemError as unreadable:
        place = f"{message.topic()}-{message.partition()}, offset {message.offset()}"
        raise Corrupt(f"{place}: the name of a header is not UTF-8, which the client cannot read: {remedy}") from unreadable


_call_headers: Final[Callable[[MessageWithHeaders], Headers | None]] = methodcaller("headers")
"""Not called directly: for a name that is not UTF-8, confluent-kafka (2.16) returns a broken list and sets an error. Python
raises ``SystemError`` for such a result, but a direct call that it has optimized does not check for one: it uses the list, and
the process ends by a segmentation fault."""
