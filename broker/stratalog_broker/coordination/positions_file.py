"""A coordinator's state in one local file, for a server without bookies (docs/reference/formats/positions-file.md).

The internal topic has one partition. A batch is applied, then the whole state replaces the file, and then the batch counts as
durable. Batches that arrive while the file is written share the next write, so there is at most one write at a time.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Coroutine
from typing import Any, Final

from crc32c import crc32c

from stratalog_broker.partitions.internal_topics import ApplicationFactory, InternalTopicApplication, no_batches
from stratalog_core.errors import Corrupt, Invalid, Unavailable
from stratalog_core.ports import Background, Files
from stratalog_metadata.records import TopicPartition

FORMAT_VERSION: Final = 1
_log = logging.getLogger(__name__)
_MAGIC: Final = b"STRATPOS"
_HEAD: Final = struct.Struct(">8sIII")
"""Magic, format version, length of the state, CRC32C of the state."""


def encode_positions(state: bytes) -> bytes:
    """Return the file's content for a state."""
    return _HEAD.pack(_MAGIC, FORMAT_VERSION, len(state), crc32c(state)) + state


def decode_positions(content: bytes, name: str) -> bytes:
    """Return the state in a file. Raises ``Corrupt``, or ``Invalid`` for another kind of file or a newer format version."""
    if content[: len(_MAGIC)] != _MAGIC or len(content) < _HEAD.size:
        raise Invalid(f"{name} is not a positions file: give --positions another path")
    _, version, length, checksum = _HEAD.unpack_from(content)
    if version != FORMAT_VERSION:
        raise Invalid(
            f"{name} has format version {version}; this release reads {FORMAT_VERSION}: use the release that wrote it"
        )
    state = content[_HEAD.size :]
    if len(state) != length or crc32c(state) != checksum:
        raise Corrupt(f"{name} does not match its checksum: restore a copy of it, or remove it and lose the groups' positions")
    return state


class PositionsFile:
    """``InternalPartitions`` of one coordinator. The caller holds the file's lock."""

    is_suspended: Final = False
    """This server needs no session."""

    def __init__(self, files: Files, name: str, background: Background) -> None:
        self._files = files
        self._name = name
        self._background = background
        self._application: InternalTopicApplication | None = None
        self._is_serving = False
        self._writing = asyncio.Lock()
        self._applied = 0
        self._saved = 0

    def register_application(self, topic: str, factory: ApplicationFactory) -> None:
        assert self._application is None, "one kind of coordinator keeps its state in a positions file"
        self._application = factory(0)

    async def load(self) -> None:
        """Load the state; a missing file is an empty one. Raises ``Corrupt``, ``Invalid`` or ``OSError``."""
        assert self._application is not None, "the coordinator is registered"
        found = self._files.read(self._name) if self._files.exists(self._name) else None
        await self._application.load(None if found is None else decode_positions(found, self._name), no_batches(), 0)
        self._is_serving = True

    def is_serving(self, topic_partition: TopicPartition) -> bool:
        return self._is_serving

    def append_internal(self, topic_partition: TopicPartition, batch: bytearray) -> Coroutine[Any, Any, int]:
        assert self._application is not None, "the coordinator is registered"
        self._application.apply(batch)
        self._applied += 1
        return self._saved_with(self._application, self._applied - 1)

    async def _saved_with(self, application: InternalTopicApplication, number: int) -> int:
        """Return the batch's number when it is saved."""
        async with self._writing:
            if self._saved <= number:
                await self._save(application)
        return number

    async def _save(self, application: InternalTopicApplication) -> None:
        applied, content = self._applied, encode_positions(application.snapshot())
        try:
            await self._background.run(lambda: self._files.write_atomic(self._name, content))
        except OSError as failure:
            raise Unavailable(f"{self._name} cannot be written: {failure.strerror}; the next commit tries again") from failure
        self._saved = applied

    async def close(self) -> None:
        """Save what is applied and not saved yet, and stop the coordinator."""
        self._is_serving = False
        if self._application is None:
            return
        try:
            async with self._writing:
                if self._saved < self._applied:
                    await self._save(self._application)
        except Unavailable as failure:
            _log.error("the last changes of groups are lost: %s", failure.message)
        self._application.resigned()
