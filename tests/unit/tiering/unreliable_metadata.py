"""A metadata client that loses the answers of manifest commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratalog_core.errors import OutcomeUnknown
from stratalog_metadata.records import ManifestPointer
from stratalog_metadata.state.commands import Applied, Command, Put


class UnreliableMetadata:
    """A real client; ``applied`` says of each lost answer whether the commit took effect."""

    def __init__(self, inner: Any, applied: Sequence[bool]) -> None:
        self._inner = inner
        self._applied = list(applied)
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        first = command.updates[0]
        if self._applied and isinstance(first, Put) and isinstance(first.record, ManifestPointer):
            self.lost += 1
            if self._applied.pop(0):
                await self._inner.propose(command, timeout_s)
            raise OutcomeUnknown("the answer was lost")
        result: Applied = await self._inner.propose(command, timeout_s)
        return result
