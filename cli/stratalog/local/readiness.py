"""Waits until a cluster serves: every bookie registered, every broker in the answer to a client's Metadata request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from stratalog.tier.session import metadata_session
from stratalog_core.errors import Unavailable
from stratalog_metadata.records import Bookie

_POLL_S = 0.1


def wait_until(serving: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    """Poll until ``serving``; raises ``Unavailable`` that names ``what`` did not come."""
    deadline = time.monotonic() + timeout_s
    while not serving():
        if time.monotonic() > deadline:
            raise Unavailable(f"{what} within {timeout_s:.0f} s")
        time.sleep(_POLL_S)


class BrokerProbe:
    """Asks one cluster for its brokers again and again, over one client."""

    def __init__(self, bootstrap: str) -> None:
        # Its own log would tell the user of every refused connection while the brokers come up.
        self._client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 200})

    def live(self) -> set[str]:
        """``host:port`` of every broker that the cluster names; empty while nobody answers."""
        self._client.poll(0)
        try:
            metadata = self._client.list_topics(timeout=2)
        except KafkaException:
            return set()
        return {f"{broker.host}:{broker.port}" for broker in metadata.brokers.values()}


def wait_for_bookies(addresses: Sequence[str], wanted: Collection[str], check: Callable[[], None], *, timeout_s: float) -> None:
    """Wait until the bookies ``wanted`` are registered; ``check`` raises if waiting has become pointless."""
    asyncio.run(_wait_for_bookies(addresses, set(wanted), check, timeout_s))


async def _wait_for_bookies(addresses: Sequence[str], wanted: set[str], check: Callable[[], None], timeout_s: float) -> None:
    missing = wanted
    try:
        async with asyncio.timeout(timeout_s):
            while missing:
                check()
                with suppress(Unavailable):
                    missing = wanted - await _registered(addresses)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise Unavailable(f"bookies {', '.join(sorted(missing))} did not register within {timeout_s:.0f} s") from None


async def _registered(addresses: Sequence[str]) -> set[str]:
    async with metadata_session(addresses) as client:
        return {bookie.bookie_id for bookie in client.view.all(Bookie) if bookie.session_id}
