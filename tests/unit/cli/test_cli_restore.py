"""``restore`` from a bucket in which a descriptor is damaged."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import CliRunner, Result
from support.archive_writer import ArchiveWriter
from support.embedded_quorum import EmbeddedQuorum

from stratalog.app import stratalog
from stratalog.restored_groups import bucket_topics
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Topic
from stratalog_tiering.format.object_keys import owner_key
from stratalog_tiering.store import ObjectStore, open_store

FLIGHTS, ORDERS = (
    Topic(name=name, topic_id=UUID(int=number), partition_count=1, replication_factor=1)
    for number, name in enumerate(("flights", "orders"), 7)
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    background = ThreadBackground(2, "store")
    yield open_store(str(tmp_path / "store"), background=background, clock=SystemClock(), random=random.Random(1))
    background.close()


async def written(store: ObjectStore, tmp_path: Path) -> Path:
    """Write the history of both topics; returns the path of the descriptor of ``orders``."""
    for number, topic in enumerate((FLIGHTS, ORDERS)):
        batch = bytes(build_batch([Record(offset=0, timestamp_ms=1, key=None, value=b"v")]))
        await ArchiveWriter(store, topic, SystemClock(), random.Random(number)).append(0, [batch])
    (found,) = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and b'"orders"' in path.read_bytes()]
    return found


async def restore(quorum: EmbeddedQuorum, tmp_path: Path, *words: str) -> Result:
    where = ["--metadata", ",".join(quorum.addresses), "--store", str(tmp_path / "store")]
    done = await asyncio.to_thread(CliRunner().invoke, stratalog, ["restore", *where, "--yes", "--json", *words])
    await quorum.client.refresh(60)
    return done


def names(quorum: EmbeddedQuorum) -> list[str]:
    return sorted(topic.name for topic in quorum.client.view.all(Topic))


async def test_a_damaged_topic_descriptor_keeps_no_other_topic_from_its_restore(
    quorum: EmbeddedQuorum, store: ObjectStore, tmp_path: Path
) -> None:
    descriptor = await written(store, tmp_path)
    intact = descriptor.read_bytes()
    descriptor.write_bytes(b"{" + intact)
    shown = await restore(quorum, tmp_path, "--dry-run")
    assert isinstance(shown.exception, Corrupt)
    assert [row["topic"] for row in json.loads(shown.stdout)["partitions"]] == ["flights"]
    assert names(quorum) == []
    done = await restore(quorum, tmp_path)
    assert isinstance(done.exception, Corrupt)
    assert "1 topics are left out" in done.exception.message
    assert descriptor.name in done.exception.message
    assert [row["topic"] for row in json.loads(done.stdout)["partitions"]] == ["flights"]
    assert names(quorum) == ["flights"]
    found = await bucket_topics(quorum.client.view, store)
    assert found.others == {ORDERS.topic_id: ""}, "its committed offsets stay for the next restore"
    descriptor.write_bytes(intact)
    assert (await restore(quorum, tmp_path)).exit_code == 0
    assert names(quorum) == ["flights", "orders"]


async def test_a_topic_is_restored_by_its_name_beside_a_damaged_one(
    quorum: EmbeddedQuorum, store: ObjectStore, tmp_path: Path
) -> None:
    descriptor = await written(store, tmp_path)
    descriptor.write_bytes(b"{" + descriptor.read_bytes())
    unclear = await restore(quorum, tmp_path, "--topic", "orders")
    assert isinstance(unclear.exception, Corrupt), "the damaged one may have this name"
    assert descriptor.name in unclear.exception.message
    assert (await restore(quorum, tmp_path, "--topic", "flights")).exit_code == 0
    assert names(quorum) == ["flights"]


async def test_a_damaged_owner_stops_a_restore(quorum: EmbeddedQuorum, store: ObjectStore, tmp_path: Path) -> None:
    """Whose bucket it is must not be guessed."""
    await written(store, tmp_path)
    owner = tmp_path / "store" / owner_key(0)
    owner.parent.mkdir(exist_ok=True)
    owner.write_bytes(b"{")
    done = await restore(quorum, tmp_path)
    assert isinstance(done.exception, Corrupt)
    assert owner_key(0) in done.exception.message
    assert names(quorum) == []
    assert owner.read_bytes() == b"{"
