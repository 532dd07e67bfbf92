"""Sends requests that confluent-kafka has no calls for: translates error codes, and repeats what may succeed later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from kio.schema.errors import ErrorCode

from stratalog import kafka_connection
from stratalog.kafka import TIMEOUT_S
from stratalog.kafka_connection import Connection, NotAnswered
from stratalog.target import host_and_port
from stratalog_core.errors import Conflict, Invalid, NotFound, Unavailable

Result = TypeVar("Result")
_RETRY_S: Final = 0.2
_RETRIABLE: Final = {
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
    ErrorCode.request_timed_out,
    ErrorCode.not_leader_or_follower,
    ErrorCode.leader_not_available,
}
_NOT_FOUND: Final = {
    ErrorCode.unknown_topic_or_partition: "no such topic or partition: {what}; see `stratalog topic list`",
    ErrorCode.transactional_id_not_found: "no transactional id {what!r}: see `stratalog txn list`",
    ErrorCode.group_id_not_found: "no group {what!r}: see `stratalog group list`",
}
_IN_USE: Final = {ErrorCode.non_empty_group, ErrorCode.group_subscribed_to_topic}


async def until_available(call: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of ``call``. Repeats it while it raises ``Unavailable`` or ``NotAnswered``, for ``TIMEOUT_S``."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return await call()
        except (Unavailable, NotAnswered) as failure:
            if time.monotonic() >= deadline:
                raise Unavailable(f"no broker served the request within {TIMEOUT_S:.0f} s: {failure.message}") from failure
        await asyncio.sleep(_RETRY_S)


async def ask_any(bootstrap: str, api: int, **fields: Any) -> Any:
    """Ask the first broker that can be reached."""
    *others, last = [":".join(host_and_port(address)) for address in bootstrap.split(",")]
    for address in others:
        try:
            return await ask(await connect(address), api, **fields)
        except NotAnswered:
            continue
    return await ask(await connect(last), api, **fields)


async def ask(connection: Connection, api: int, **fields: Any) -> Any:
    """Ask one broker, and close the connection. Raises ``NotAnswered``, also after ``TIMEOUT_S``."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await connection.ask(api, **fields)
    except TimeoutError:
        raise NotAnswered(f"no answer within {TIMEOUT_S:.0f} s") from None
    finally:
        connection.close()


async def connect(address: str) -> Connection:
    """Open a connection to a broker. Raises ``NotAnswered``, also after ``TIMEOUT_S``, and ``Invalid``."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await kafka_connection.connect(address)
    except TimeoutError:
        raise NotAnswered(f"{address}: no connection within {TIMEOUT_S:.0f} s") from None


def check(code: ErrorCode, what: str) -> None:
    """Raise the error for a code other than NONE; ``Unavailable`` if a retry may succeed. ``what``: the resource asked for."""
    if code is ErrorCode.none:
        return
    if code in _RETRIABLE:
        raise Unavailable(f"{what}: {code.name}")
    if code in _NOT_FOUND:
        raise NotFound(_NOT_FOUND[code].format(what=what))
    if code in _IN_USE:
        raise Conflict(f"{what}: {code.name}; stop the group's consumers of the topic first")
    raise Invalid(f"{what}: {code.name}")
