"""Adds whose frames take more than a log file, although their bytes fit into one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from unit.bookies.disk.one_disk import new_files, opened
from unit.bookies.disk.test_transient_errors import add, entries

from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import RECOVERY_ADD, Status

ENTRIES = 1600


async def test_recovery_adds_that_get_a_frame_each_may_take_several_files(tmp_path: Path) -> None:
    payloads = [bytes((number % 256,)) for number in range(ENTRIES)]
    headers = [messages.pack_entry(1, number, -1, (payload,), RECOVERY_ADD) for number, payload in enumerate(payloads)]
    body = memoryview(b"".join(messages.encode_add(headers, payloads)))
    async with opened(new_files(tmp_path), tmp_path) as disk:
        assert await add(disk, 2, 0, bytes(30_000)) is Status.OK
        await disk.fence([1])
        assert len(body) < disk.add_bytes_max
        answered: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()
        start = messages.payloads_start(ENTRIES)
        disk.add(
            messages.decode_add(body), body, messages.COUNT_BYTES, start, len(body) - messages.COUNT_BYTES,
            answered.set_result,
        )  # fmt: skip
        assert set(await answered) == {Status.OK}
        assert await entries(disk, 1) == dict(enumerate(payloads))
