"""Reads the log directories of Apache Kafka: ``TOPIC-PARTITION/<base offset>.log``, record batches of format v2 back to back.

Index files are not read. Records below the offset in ``log-start-offset-checkpoint`` were deleted by a client. The broker must
be stopped, or the topic idle: a batch that is only partly in the last file is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from stratalog_core.batches.batch import HEADER_BYTES, LENGTH_PREFIX_BYTES, MAGIC, read_header
from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.natural_numbers import natural_number
from stratalog_core.ports import Background, Buffer
from stratalog_tiering.attach.source import TopicSource, chosen_topic

_CHUNK_BYTES: Final = 4 * 1024 * 1024
_BATCH_BYTES_MAX: Final = 128 * 1024 * 1024
_LOG_FILE: Final = re.compile(r"\d{20}\.log")
_PARTITION: Final = re.compile(r"(?P<topic>[a-zA-Z0-9._-]+)-(?P<index>\d+)")
_START_OFFSETS: Final = "log-start-offset-checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaPartition:
    """One partition's log files in offset order, without those before the first batch; none if all records have expired."""

    files: tuple[Path, ...]
    base_offset: int
    log_start_offset: int
    background: Background

    @property
    def stored_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    async def batches(self) -> AsyncIterator[Sequence[Buffer]]:
        for file in self.files:
            position, size = 0, file.stat().st_size
            while position < size:
                chunk = await self.background.run(partial(_read_batches, file, position, size))
                if not chunk:
                    break
                yield chunk
                position += sum(map(len, chunk))


def is_kafka_directory(directory: Path) -> bool:
    """Whether the directory holds log directories of Kafka."""
    return bool(_partition_directories(directory))


def kafka_topic(directories: Sequence[Path], wanted: str | None, background: Background) -> TopicSource:
    """The topic ``wanted``, or the only one, in the log directories of one or more brokers. Blocks.

    Raises ``Invalid`` if a partition is missing or in several directories, ``Corrupt`` for a damaged first batch.
    """
    found: dict[str, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    starts: dict[tuple[str, int], int] = {}
    for directory in directories:
        starts.update(_start_offsets(directory / _START_OFFSETS))
        for topic, index, path in _partition_directories(directory):
            found[topic][index].append(path)
    where = ", ".join(str(directory) for directory in directories)
    topics = sorted(topic for topic in found if not topic.startswith("__"))
    name = chosen_topic(where, topics, wanted)
    paths = found[name]
    missing = sorted(set(range(max(paths) + 1)) - paths.keys())
    if missing:
        raise Invalid(f"{where} lacks partitions {missing} of topic {name}: name the log directories of the other brokers, too")
    for index, copies in sorted(paths.items()):
        if len(copies) > 1:
            listed = " and ".join(map(str, copies))
            raise Invalid(f"partition {index} of topic {name} is in {listed}: name one directory for each partition")
    partitions = {index: _partition(copies[0], starts.get((name, index), 0), background) for index, copies in paths.items()}
    return TopicSource(
        name=name,
        partition_count=max(paths) + 1,
        partitions={index: each for index, each in sorted(partitions.items()) if each is not None},
    )


def _partition_directories(directory: Path) -> list[tuple[str, int, Path]]:
    found = []
    for path in sorted(directory.iterdir()):
        match = _PARTITION.fullmatch(path.name)
        if match is not None and path.is_dir() and any(_LOG_FILE.fullmatch(file.name) for file in path.iterdir()):
            found.append((match["topic"], int(match["index"]), path))
    return found


def _partition(directory: Path, log_start_offset: int, background: Background) -> KafkaPartition | None:
    """The partition in a log directory; None if it never had records.

    If all of them have expired, the name of the last file tells the next offset.
    """
    files = sorted(file for file in directory.iterdir() if _LOG_FILE.fullmatch(file.name))
    for number, file in enumerate(files):
        size = file.stat().st_size
        first = _read_batches(file, 0, size, 1) if size else []
        if first:
            base_offset = read_header(first[0]).base_offset
            return KafkaPartition(
                files=tuple(files[number:]), base_offset=base_offset, log_start_offset=max(log_start_offset, base_offset),
                background=background,
            )  # fmt: skip
    end_offset = max(log_start_offset, int(files[-1].stem))
    if not end_offset:
        return None
    return KafkaPartition(files=(), base_offset=end_offset, log_start_offset=end_offset, background=background)


def _read_batches(file: Path, position: int, size: int, wanted_bytes: int = _CHUNK_BYTES) -> list[Buffer]:
    """Whole batches from ``position`` on, of about ``wanted_bytes``, at least one; none in space that was only allocated."""
    with file.open("rb") as opened:
        opened.seek(position)
        content = opened.read(max(min(wanted_bytes, size - position), HEADER_BYTES))
        needed = _batch_bytes(file, position, size, content)
        if needed == 0:
            return []
        if needed > len(content):
            content += opened.read(needed - len(content))
    batches: list[Buffer] = []
    view, at = memoryview(content), 0
    while at + HEADER_BYTES <= len(view):
        length = _batch_bytes(file, position + at, size, view[at : at + HEADER_BYTES])
        if length == 0 or at + length > len(view):
            break
        batches.append(view[at : at + length])
        at += length
    return batches


def _batch_bytes(file: Path, position: int, size: int, head: Buffer) -> int:
    """The size of the batch that begins with ``head``; 0 if there are only zeros."""
    if len(head) >= LENGTH_PREFIX_BYTES and not any(memoryview(head)[:HEADER_BYTES]):
        return 0
    if len(head) < HEADER_BYTES:
        raise _cut_short(file, position)
    header = read_header(head)
    if header.magic != MAGIC:
        raise Invalid(
            f"{file} holds messages of format {header.magic} at byte {position}; only format 2 is read, which Kafka has"
            " written since 0.11"
        )
    if not HEADER_BYTES <= header.size_bytes <= _BATCH_BYTES_MAX:
        raise Corrupt(f"{file}: the batch at byte {position} claims {header.size_bytes} bytes")
    if position + header.size_bytes > size:
        raise _cut_short(file, position)
    return header.size_bytes


def _cut_short(file: Path, position: int) -> Corrupt:
    return Corrupt(f"{file} ends within the batch at byte {position}: stop the broker first, or copy the file again")


def _start_offsets(checkpoint: Path) -> dict[tuple[str, int], int]:
    """The start offsets in a broker's checkpoint, which has a version, a count, and ``TOPIC PARTITION OFFSET`` lines."""
    if not checkpoint.is_file():
        return {}
    starts = {}
    for line in checkpoint.read_text().splitlines()[2:]:
        parts = line.split()
        topic, partition, offset = parts if len(parts) == 3 else ("", "", "")
        index, start = natural_number(partition), natural_number(offset)
        if index is None or start is None:
            raise Corrupt(f"{checkpoint} has a line that is no topic, partition and offset: {line!r}")
        starts[topic, index] = start
    return starts
