"""A request that a test hands to a server directly, within one turn of the event loop."""

from __future__ import annotations

from typing import cast

import msgspec

from stratalog_core.errors import StratalogError
from stratalog_core.ports import Buffer, Connection
from stratalog_metadata.protocol import messages


class AskedRequest:
    """Keeps its answer; None until there is one. See :class:`stratalog_core.ports.Request`."""

    def __init__(self, method: int, body: msgspec.Struct) -> None:
        self.method = method
        self.body = memoryview(messages.encode(body))
        self.connection = cast(Connection, None)
        self.answer: bytes | StratalogError | None = None

    def reply(self, *parts: Buffer) -> None:
        self._answered(b"".join(parts))

    def fail(self, error: StratalogError) -> None:
        self._answered(error)

    def _answered(self, answer: bytes | StratalogError) -> None:
        assert self.answer is None, "a request is answered once"
        self.answer = answer
