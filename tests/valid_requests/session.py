"""A cluster that is asked everything that makes sense, in batches; the probe follows each batch, and a takeover the last.

What fails a run: a request that is not answered, a connection that the broker closes, an answer that does not decode, an error
that is logged, and whatever the probe misses. The failure names the seed and the requests of the last batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from fuzz.kafka_requests import entity
from fuzz.serving import Failures
from kio.index import load_request_schema
from unit.broker.mini_cluster import MiniCluster, run_cluster
from unit.broker.raw_client import RawClient

from stratalog_broker.handlers import HANDLERS
from stratalog_broker.protocol.entities import encode_response as encode
from valid_requests.probe import TOPIC, Probe
from valid_requests.values import NAMES, Learned, Values

CONNECTIONS: Final = 3
REQUESTS: Final = 20
"""Of each connection in a batch."""
_PRODUCE: Final = 0
_SHOWN_CHARACTERS: Final = 700
_SETTINGS: Final[dict[str, Any]] = {
    "group_session_timeout_min_ms": 100,
    "offsets_topic_replication_factor": 2,
    "transaction_state_log_replication_factor": 2,
}
_OFTEN: Final = (0, 0, 1, 8, 9, 10, 11, 11, 12, 14, 21, 44)
"""Drawn more often than the rest: they change what is stored, or need each other."""
_RARELY: Final = frozenset({18, 20, 60})


class BrokeDown(AssertionError):
    """A request that makes sense was not answered, or broke something."""


@dataclass(slots=True)
class Session:
    """One seed on one cluster."""

    seed: int
    cluster: MiniCluster
    probe: Probe = field(default_factory=Probe)
    sent: list[str] = field(default_factory=list)
    """Requests of the batch, in the order of their sending."""
    requests: int = 0

    async def run(self, batches: int, deadline_s: float = float("inf")) -> None:
        """Raises ``BrokeDown`` with everything that is needed to look into it."""
        with collected_failures() as failures:
            await self.probe.prepare(self._address, *NAMES)
            learned = Learned()
            for batch in range(batches):
                self.sent.clear()
                await self._guarded(failures, self._batch(batch, learned))
                if time.monotonic() >= deadline_s:
                    break
            await self._guarded(failures, self._take_over())

    @property
    def _address(self) -> str:
        return self.cluster.broker.kafka_address

    async def _guarded(self, failures: Failures, work: Any) -> None:
        try:
            await work
        except (Exception, asyncio.CancelledError) as broken:
            raise BrokeDown(self._story([f"{type(broken).__name__}: {broken}", *failures.found])) from broken
        if failures.found:
            raise BrokeDown(self._story(failures.found))

    def _story(self, complaints: list[str]) -> str:
        lines = [f"seed {self.seed} breaks a broker:", *complaints, f"the batch's {len(self.sent)} requests:", *self.sent]
        return "\n".join(lines)

    async def _batch(self, number: int, learned: Learned) -> None:
        seeds = [Random(f"{self.seed}/{number}/{connection}") for connection in range(CONNECTIONS)]
        await asyncio.gather(*(self._converse(random, learned) for random in seeds))
        await self.probe.check(self._address)

    async def _converse(self, random: Random, learned: Learned) -> None:
        client = await RawClient.connect(self._address)
        try:
            for _ in range(REQUESTS):
                values = Values(random, self.cluster.broker.metadata.view, learned, TOPIC)
                key, version = _draw_api(random)
                request = entity(load_request_schema(key, version), values)
                self.sent.append(f"{type(request).__name__} v{version} {request}"[:_SHOWN_CHARACTERS])
                self.requests += 1
                if key == _PRODUCE and request.acks == 0:
                    client = await self._unanswered(client, key, version, request)
                else:
                    learned.take(await client.call(key, version, request))
        finally:
            await client.close()

    async def _unanswered(self, client: RawClient, key: int, version: int, request: Any) -> RawClient:
        """Nobody hears of what becomes of it; where it fails, the connection is closed, as Kafka does."""
        client.send(key, version, encode(request))
        await client.close()
        return await RawClient.connect(self._address)

    async def _take_over(self) -> None:
        """Another broker replays everything that was written."""
        self.sent.append("another broker takes everything over")
        successor = max(self.cluster.brokers) + 1
        await self.cluster.start_broker(successor)
        first = next(iter(self.cluster.brokers))
        await self.cluster.brokers.pop(first).kill()
        await self.probe.check_kept(self._address)
        await self.probe.check(self._address)


def _draw_api(random: Random) -> tuple[int, int]:
    key = random.choice([*(key for key in HANDLERS if key not in _RARELY or random.random() < 0.2), *_OFTEN])
    return key, random.randint(HANDLERS[key].min_version, HANDLERS[key].max_version)


@contextmanager
def collected_failures() -> Iterator[Failures]:
    """Collects logged errors and calls of the event loop's exception handler while it is entered."""
    failures, root, loop = Failures(), logging.getLogger(), asyncio.get_running_loop()
    before = loop.get_exception_handler()
    root.addHandler(failures)
    loop.set_exception_handler(failures.unhandled)
    try:
        yield failures
    finally:
        root.removeHandler(failures)
        loop.set_exception_handler(before)


async def run_seed(directory: Path, seed: int, batches: int, deadline_s: float = float("inf")) -> int:
    """How many requests were answered."""
    async with run_cluster(directory, bookies=2, **_SETTINGS) as cluster:
        session = Session(seed, cluster)
        await session.run(batches, deadline_s)
        return session.requests
