"""Registering a broker, and registering it anew, whenever its session may end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.embedded_quorum import embedded_quorum

from stratalog_broker.cluster import registration as registration_module
from stratalog_broker.cluster.registration import Registration
from stratalog_core.restarting import restarting
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import Broker, broker_key
from stratalog_metadata.state.commands import Command, ExpireSession


@pytest_asyncio.fixture
async def metadata(tmp_path: Path) -> AsyncIterator[QuorumClient]:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path, transport) as quorum:
        yield quorum.client
    await transport.close()


class Journal:
    """The events that the registration reports, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.changed = asyncio.Event()

    def note(self, event: str) -> None:
        self.events.append(event)
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.events) < count:
                self.changed.clear()
                await self.changed.wait()


def registration(
    metadata: QuorumClient,
    journal: Journal,
    port: int = 9092,
    lease_ms: int = 60_000,
    on_registered: Callable[[], None] | None = None,
) -> Registration:
    return Registration(
        metadata,
        SystemClock(),
        broker=Broker(broker_id=1, host="here", port=port, session_id=0),
        lease_ms=lease_ms,
        grace_ms=0,
        on_registered=on_registered or (lambda: journal.note("registered")),
        on_lost=lambda: journal.note("lost"),
    )


def registered(metadata: QuorumClient) -> Broker | None:
    return metadata.view.find(Broker, broker_key(1))


async def test_a_lost_session_is_followed_by_the_next(metadata: QuorumClient) -> None:
    journal = Journal()
    one = registration(metadata, journal)
    await one.start()
    for count in (3, 5):
        before = registered(metadata)
        assert before is not None
        await metadata.propose(Command(updates=(ExpireSession(session_id=before.session_id),)))
        await journal.until(count)
        after = registered(metadata)
        assert after is not None
        assert after.session_id != before.session_id
    assert journal.events == ["registered", "lost", "registered", "lost", "registered"]
    await one.close()
    assert registered(metadata) is None


async def test_an_unexpected_error_at_the_registration_does_not_keep_the_broker_away(
    metadata: QuorumClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration_module, "restarting", partial(restarting, pause_s=0.01))
    journal, failures = Journal(), [RuntimeError("unexpected")]

    def on_registered() -> None:
        journal.note("registered")
        if failures:
            raise failures.pop()

    one = registration(metadata, journal, on_registered=on_registered)
    async with asyncio.timeout(60):
        await one.start()
    assert journal.events == ["registered", "lost", "registered"]
    assert registered(metadata) is not None
    await one.close()
    assert registered(metadata) is None


async def test_an_id_that_is_taken_is_waited_for(metadata: QuorumClient, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Journal(), Journal()
    holder = registration(metadata, first, port=1)
    await holder.start()
    waiting = registration(metadata, second, port=2)
    with caplog.at_level(logging.INFO, registration_module.__name__):
        starting = asyncio.ensure_future(waiting.start())
        async with asyncio.timeout(60):
            while "broker id 1 is registered; waiting" not in caplog.text:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
    assert second.events == []
    found = registered(metadata)
    assert found is not None
    assert found.port == 1
    await holder.close()
    await starting
    found = registered(metadata)
    assert found is not None
    assert found.port == 2
    await waiting.close()
