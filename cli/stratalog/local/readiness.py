"""Waits until a cluster serves: every bookie and broker is registered, and a client's Metadata request names every broker.

The response alone does not show that a broker serves: brokers list dead ones for some seconds, and themselves before they are
registered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from stratalog.tier.session import metadata_session
from stratalog_core.errors import Unavailable
from stratalog_metadata.records import Bookie, Broker

_POLL_S = 0.1

Check = Callable[[], None]
"""Called before each poll. Raises if waiting is pointless, for example because a process has exited."""


def wait_for_brokers(bootstrap: str, wanted: Collection[str], check: Check, *, timeout_s: float) -> None:
    """Wait until the cluster names all ``wanted`` brokers (``host:port``). Raises ``Unavailable``, or what ``check`` raises."""
    # At its default log level the client would report every refused connection while the brokers start.
    client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 200})
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        missing = set(wanted) - _live_brokers(client)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise Unavailable(f"brokers {', '.join(sorted(missing))} did not serve within {timeout_s:.0f} s: see their logs")
        time.sleep(_POLL_S)


def _live_brokers(client: AdminClient) -> set[str]:
    """Return ``host:port`` of every broker that the cluster names, or an empty set if none answers."""
    client.poll(0)
    try:
        metadata = client.list_topics(timeout=2)
    except KafkaException:
        return set()
    return {f"{broker.host}:{broker.port}" for broker in metadata.brokers.values()}


def wait_for_registrations(addresses: Sequence[str], wanted: Collection[str], check: Check, *, timeout_s: float) -> None:
    """Wait until all bookies (by id) and brokers (by ``host:port``) of ``wanted`` have sessions with the quorum.

    Raises ``Unavailable``, or what ``check`` raises.
    """
    asyncio.run(_wait_for_registrations(addresses, set(wanted), check, timeout_s))


async def _wait_for_registrations(addresses: Sequence[str], wanted: set[str], check: Check, timeout_s: float) -> None:
    missing = wanted
    try:
        async with asyncio.timeout(timeout_s):
            while missing:
                check()
                with suppress(Unavailable):
                    missing = wanted - await _registered(addresses)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        names = ", ".join(sorted(missing))
        raise Unavailable(f"{names} did not register within {timeout_s:.0f} s: see their logs") from None


async def _registered(addresses: Sequence[str]) -> set[str]:
    async with metadata_session(addresses) as client:
        bookies = {bookie.bookie_id for bookie in client.view.all(Bookie) if bookie.session_id}
        return bookies | {f"{broker.host}:{broker.port}" for broker in client.view.all(Broker)}
