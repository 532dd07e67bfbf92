"""A wrapped channel, so that a test can observe or lose what a ledger client sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stratalog_core.ports import Buffer, Channel, OnReply


class WrappedChannel:
    """Forwards everything; override ``send``. Ledger clients never use ``call``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def address(self) -> str:
        return self._channel.address

    def send(self, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
        self._channel.send(method, parts, on_reply, timeout_s)

    async def call(self, method: int, parts: Sequence[Buffer], timeout_s: float) -> memoryview:
        raise NotImplementedError

    def on_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._channel.on_lost(callback)

    async def close(self) -> None:
        await self._channel.close()
