"""A metadata client without a quorum: state machine and view in this process's memory, lost when it ends.

For processes that need no durable metadata, such as the server of an archive, and for tests. Each command takes effect in one
turn of the event loop. Sessions never expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from stratalog_core.errors import StratalogError, Unavailable
from stratalog_metadata.client.view import LocalView
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.protocol.messages import KeyChange, StatusAnswer
from stratalog_metadata.records import Versioned
from stratalog_metadata.state.commands import Applied, Command, ExpireSession, OpenSession
from stratalog_metadata.state.machine import apply


class MemoryMetadata(LocalView):
    """See :class:`stratalog_metadata.client.api.MetadataClient`."""

    @property
    def view(self) -> LocalView:
        return self

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        index = self.index + 1
        outcome = apply(self._records, index, command)
        if isinstance(outcome.result, StratalogError):
            raise outcome.result
        self.follow(index, [[KeyChange(change.key, change.after) for change in outcome.changes]])
        await asyncio.sleep(0)
        return outcome.result

    async def refresh(self, timeout_s: float = 10.0) -> int:
        return self.index

    async def read(self, keys: Sequence[str], timeout_s: float = 10.0) -> list[Versioned | None]:
        await asyncio.sleep(0)
        return [self.get(key) for key in keys]

    async def scan(self, prefix: str, timeout_s: float = 10.0) -> list[Versioned]:
        await asyncio.sleep(0)
        return list(self._records.scan(prefix))

    async def quorum_status(self, timeout_s: float = 10.0) -> StatusAnswer:
        raise Unavailable("this server has no metadata quorum")

    async def open_session(
        self,
        holder: str,
        lease_ms: int,
        on_expired: Callable[[], None],
        grace_ms: int = 0,
        load: Callable[[], BrokerLoad | None] | None = None,
    ) -> int:
        return (await self.propose(Command(updates=(OpenSession(holder=holder, lease_ms=lease_ms),)))).allocated[0]

    async def close_session(self, session_id: int) -> None:
        await self.propose(Command(updates=(ExpireSession(session_id=session_id),)))

    async def close(self) -> None:
        pass
