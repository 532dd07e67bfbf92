"""Waits until a cluster serves, as a client sees it: every broker in the answer to a Metadata request."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from stratalog_core.errors import Unavailable

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
