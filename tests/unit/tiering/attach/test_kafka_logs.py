"""Reading Kafka's log directories: what is accepted and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.system import ThreadBackground
from stratalog_tiering.attach import kafka_logs
from stratalog_tiering.attach.kafka_logs import is_kafka_directory, kafka_topic

Batches = Callable[..., list[bytes]]


def write(directory: Path, partition: str, content: bytes, base_offset: int = 0) -> None:
    path = directory / partition
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{base_offset:020d}.log").write_bytes(content)


async def read(directory: Path, background: ThreadBackground) -> list[bytes]:
    source = kafka_topic([directory], None, background)
    return [bytes(batch) async for chunk in source.partitions[0].batches() for batch in chunk]


@pytest.mark.parametrize("chunk_bytes", [1, 61, 100, 150, 1 << 20])
async def test_batches_are_read_whole_whatever_the_size_of_a_chunk(
    tmp_path: Path, make_batches: Batches, background: ThreadBackground, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(kafka_logs._read_batches, "__defaults__", (chunk_bytes,))
    first, second = make_batches(7, [1, 30, 2]), make_batches(40, [1, 1])
    write(tmp_path, "flights-0", b"".join(first), 7)
    write(tmp_path, "flights-0", b"".join(second) + bytes(1000), 40)
    assert await read(tmp_path, background) == [*first, *second]


def test_partitions_of_several_brokers_are_one_topic(
    tmp_path: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    for index in range(3):
        write(tmp_path / f"broker-{index % 2}", f"flights-{index}", b"".join(make_batches(0, [index + 1])))
    directories = [tmp_path / "broker-0", tmp_path / "broker-1"]
    source = kafka_topic(directories, "flights", background)
    assert (source.name, source.partition_count, sorted(source.partitions)) == ("flights", 3, [0, 1, 2])
    with pytest.raises(Invalid, match=r"lacks partitions \[1\]"):
        kafka_topic(directories[:1], "flights", background)
    write(tmp_path / "broker-0", "flights-1", b"".join(make_batches(0, [2])))
    with pytest.raises(Invalid, match="name one directory for each partition"):
        kafka_topic(directories, "flights", background)


def test_the_topic_must_be_chosen_and_there(tmp_path: Path, make_batches: Batches, background: ThreadBackground) -> None:
    content = b"".join(make_batches(0, [1]))
    for name in ("flights-0", "air-lines-0", "__consumer_offsets-0", "flights-1.7f3a-delete", "flights-1.7f3a-future"):
        write(tmp_path, name, content)
    with pytest.raises(Invalid, match="choose one with --topic; there are air-lines, flights"):
        kafka_topic([tmp_path], None, background)
    with pytest.raises(Invalid, match="holds no topic 'trains'"):
        kafka_topic([tmp_path], "trains", background)
    assert kafka_topic([tmp_path], "air-lines", background).partition_count == 1


def test_a_directory_of_kafka_is_told_from_a_bucket(tmp_path: Path, make_batches: Batches) -> None:
    (tmp_path / "segments" / "4f").mkdir(parents=True)
    (tmp_path / "flights-0").mkdir()
    assert not is_kafka_directory(tmp_path)
    write(tmp_path, "flights-0", b"".join(make_batches(0, [1])))
    assert is_kafka_directory(tmp_path)


async def test_a_file_that_ends_within_a_batch_is_refused(
    tmp_path: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    whole = b"".join(make_batches(0, [1, 1]))
    for cut in (1, 30, 70):
        write(tmp_path, "flights-0", whole[:-cut])
        with pytest.raises(Corrupt, match="stop the broker first"):
            await read(tmp_path, background)


async def test_older_formats_and_impossible_lengths_are_refused(
    tmp_path: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    (batch,) = make_batches(0, [1])
    write(tmp_path, "flights-0", batch[:16] + b"\x01" + batch[17:])
    with pytest.raises(Invalid, match="messages of format 1"):
        await read(tmp_path, background)
    write(tmp_path, "flights-0", batch[:8] + (-5).to_bytes(4, "big", signed=True) + batch[12:])
    with pytest.raises(Corrupt, match="claims 7 bytes"):
        await read(tmp_path, background)


def test_a_damaged_checkpoint_of_start_offsets_is_refused(
    tmp_path: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    write(tmp_path, "flights-0", b"".join(make_batches(5, [3])), 5)
    (tmp_path / "log-start-offset-checkpoint").write_text("0\n1\nflights 0\n")
    with pytest.raises(Corrupt, match="no topic, partition and offset"):
        kafka_topic([tmp_path], None, background)
    (tmp_path / "log-start-offset-checkpoint").write_text("0\n1\nflights 0 6\n")
    assert kafka_topic([tmp_path], None, background).partitions[0].log_start_offset == 6
