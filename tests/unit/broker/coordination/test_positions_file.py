"""Positions in a file: what was acknowledged is there after a restart; another file or a damaged one is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import pytest

from stratalog_broker.coordination.positions_file import PositionsFile, decode_positions, encode_positions
from stratalog_core.errors import Corrupt, Invalid, Unavailable
from stratalog_core.ports import Buffer
from stratalog_core.system import SystemFiles
from stratalog_metadata.records import TopicPartition

Result = TypeVar("Result")
PARTITION = TopicPartition(UUID(int=1), 0)
NAME = "positions"


class Appended:
    """An application whose state is all batches."""

    def __init__(self) -> None:
        self.state = b""
        self.is_resigned = False

    async def load(self, state: bytes | None, batches: AsyncIterable[Buffer], leader_epoch: int) -> None:
        self.state = state or b""

    def apply(self, batch: Buffer) -> None:
        self.state += bytes(batch)

    def snapshot(self) -> bytes:
        return self.state

    def resigned(self) -> None:
        self.is_resigned = True


class SlowDisk:
    """Runs each call at once and reports it a little later; counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def _later(self, result: Result) -> Result:
        for _ in range(3):
            await asyncio.sleep(0)
        return result

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        self.calls += 1
        return self._later(call())

    def close(self) -> None:
        """Nothing to close."""


async def opened(directory: Path, disk: SlowDisk | None = None) -> tuple[PositionsFile, Appended]:
    file, application = PositionsFile(SystemFiles(directory), NAME, disk or SlowDisk()), Appended()
    file.register_application("topic", lambda _: application)
    assert not file.is_serving(PARTITION)
    await file.load()
    assert file.is_serving(PARTITION)
    return file, application


async def test_acknowledged_batches_are_there_after_a_restart(tmp_path: Path) -> None:
    file, _ = await opened(tmp_path)
    for content in (b"one", b"two"):
        await file.append_internal(PARTITION, bytearray(content))
    _, again = await opened(tmp_path)
    assert again.state == b"onetwo"


async def test_batches_that_arrive_during_a_write_share_the_next(tmp_path: Path) -> None:
    disk = SlowDisk()
    file, application = await opened(tmp_path, disk)
    await asyncio.gather(*(file.append_internal(PARTITION, bytearray(b"x")) for _ in range(50)))
    assert disk.calls <= 2
    assert (await opened(tmp_path))[1].state == application.state == b"x" * 50


async def test_a_failed_write_is_reported_and_made_up_for(tmp_path: Path) -> None:
    file, _ = await opened(tmp_path)
    (tmp_path / f"{NAME}.tmp").mkdir()
    with pytest.raises(Unavailable, match="cannot be written"):
        await file.append_internal(PARTITION, bytearray(b"one"))
    assert not (tmp_path / NAME).exists()
    (tmp_path / f"{NAME}.tmp").rmdir()
    await file.append_internal(PARTITION, bytearray(b"two"))
    assert (await opened(tmp_path))[1].state == b"onetwo"


async def test_closing_saves_what_is_applied_and_stops_the_application(tmp_path: Path) -> None:
    file, application = await opened(tmp_path)
    appends = [asyncio.create_task(file.append_internal(PARTITION, bytearray(b"x"))) for _ in range(3)]
    await asyncio.sleep(0)
    for append in appends:
        append.cancel()
    await file.close()
    assert application.is_resigned
    assert (await opened(tmp_path))[1].state == b"xxx"
    assert not file.is_serving(PARTITION)


def test_the_format_is_as_documented() -> None:
    content = bytes.fromhex("53545241 54504f53 00000001 00000009 e3069283") + b"123456789"
    assert encode_positions(b"123456789") == content
    assert decode_positions(content, NAME) == b"123456789"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", Invalid, "is not a positions file"),
        (b"#!/bin/sh\necho my important script", Invalid, "is not a positions file"),
        (encode_positions(b"state")[:-1], Corrupt, "does not match its checksum"),
        (encode_positions(b"state").replace(b"sta", b"stb"), Corrupt, "does not match its checksum"),
        (encode_positions(b"state").replace(b"\1", b"\2", 1), Invalid, "format version 2; this release reads 1"),
    ],
)
def test_another_file_or_a_damaged_one_is_refused(content: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decode_positions(content, NAME)
