"""The bookie's registration in a real quorum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.embedded_quorum import embedded_quorum
from unit.bookies.disk.test_transient_errors import until

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.node.registration import Registration
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Bookie, bookie_key
from stratalog_metadata.state.commands import Command, ExpireSession


class LateNews:
    """A metadata client that reports the end of a session when the test says so, as one whose view lags."""

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self.report: list[Callable[[], None]] = []

    async def open_session(self, holder: str, lease_ms: int, on_expired: Callable[[], None]) -> int:
        self.report.append(on_expired)
        return await self._client.open_session(holder, lease_ms, lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _record(client: MetadataClient) -> Bookie:
    record = client.view.find(Bookie, bookie_key("b1"))
    assert record is not None
    return record


async def test_late_news_of_an_ended_session_leave_its_successor(tmp_path: Path) -> None:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path / "metadata", transport) as quorum:
        client: Any = LateNews(quorum.client)
        settings = BookieSettings(bookie_id="b1", data_dirs=(str(tmp_path / "disk"),), lease_ms=60_000)
        registration = Registration(settings, client)
        await registration.register("ab" * 16, "h:1", read_only=False, low_on_space=False, failed_disks=(), full_disks=())
        first = registration.session_id
        await quorum.client.propose(Command(updates=(ExpireSession(session_id=first),)))
        registration.set_state(read_only=True, low_on_space=False, failed_disks=(), full_disks=())
        await until(lambda: _record(quorum.client).read_only)
        second = registration.session_id
        assert first != second == _record(quorum.client).session_id
        client.report[0]()
        assert registration.session_id == second
        client.report[1]()
        assert registration.session_id == 0
        await registration.close()
    await transport.close()
