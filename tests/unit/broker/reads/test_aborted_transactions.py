"""Readers of committed records miss nothing and see nothing aborted, whichever ledgers their offsets are in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster, until_served
from unit.broker.partitions.test_failover import create_topic
from unit.broker.transactional import TransactionalHistory, append, mark, partition_of, read_committed, transactional
from unit.metadata.watching import until

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.reads.aborted_transactions import runs_in
from stratalog_core.batches.batch import read_header, write_header
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.partition_state.transactions import ABORT, build_marker
from stratalog_metadata.records import ManifestPointer, manifest_pointer_key
from stratalog_pipeline.arrow.schema import COLUMNS
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.pruning import EVERYTHING
from stratalog_pipeline.scan import scan_split
from stratalog_pipeline.scan_plan import plan_scan

TOPIC = "flights"


def log_of(cluster: MiniCluster) -> PartitionLog:
    log = cluster.broker.partitions.find(partition_of(cluster, TOPIC))
    assert log is not None
    return log


@pytest.mark.parametrize("seed", range(2))
async def test_transactions_across_ledgers_and_owners(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    async with run_cluster(tmp_path) as cluster:
        await in_thread(lambda: create_topic(cluster, TOPIC, 1))
        history = TransactionalHistory(TOPIC, random)
        owners = 1
        for end in ("roll", "kill", "roll", "stop", "kill", "roll"):
            await until_served(cluster.broker, partition_of(cluster, TOPIC).topic_id)
            client = await cluster.connect()
            for _ in range(12):
                await history.step(cluster, client)
                if random.random() < 0.2:
                    await log_of(cluster).seal_all()
            await history.check(client, log_of(cluster).core.last_stable_offset)
            if end != "roll":
                running = cluster.brokers.pop(owners)
                await (running.kill() if end == "kill" else running.stop())
                owners += 1
                await cluster.start_broker(owners)
        client = await cluster.connect()
        await history.end_all(client)
        await history.check(client, log_of(cluster).core.high_watermark)


async def test_a_search_ends_at_the_first_ledger_behind_which_nothing_can_be(tmp_path: Path) -> None:
    """kafka#17659: a reader far behind must not look through all later ledgers."""
    async with run_cluster(tmp_path) as cluster:
        await in_thread(lambda: create_topic(cluster, TOPIC, 1))
        await until_served(cluster.broker, partition_of(cluster, TOPIC).topic_id)
        client = await cluster.connect()
        await append(cluster, TOPIC, transactional(1, 0, b"hidden"))
        await append(cluster, TOPIC, transactional(2, 0, b"hidden, too"))
        assert await mark(client, TOPIC, 1, ABORT) == 0
        await log_of(cluster).seal_all()
        assert await mark(client, TOPIC, 2, ABORT) == 0
        for sequence in range(5):
            await log_of(cluster).seal_all()
            await append(cluster, TOPIC, transactional(3, sequence, b"later"))
            assert await mark(client, TOPIC, 3, ABORT) == 0
        await cluster.brokers.pop(1).stop()
        successor = (await cluster.start_broker(2)).server
        await until_served(successor, partition_of(cluster, TOPIC).topic_id)
        log = log_of(cluster)
        found = await successor.aborted.find(log, 0, 1)
        assert found == [(1, 0, 2)]
        assert await successor.aborted.find(log, 0, 2) == [(1, 0, 2), (2, 1, 3)]
        refs = successor.reader.hot_ledgers(log)
        built = [successor.partitions.memory.indexes.cached(ref.ledger_id) is not None for ref in refs]
        assert built[:2] == [True, True]
        assert not any(built[2:-1]), "the takeover has read the last one"
        client = await cluster.connect()
        assert await read_committed(client, TOPIC) == []


def cold_end(cluster: MiniCluster) -> int:
    identity = partition_of(cluster, TOPIC)
    pointer = cluster.metadata.view.find(ManifestPointer, manifest_pointer_key(identity.topic_id, identity.partition))
    return 0 if pointer is None else pointer.end_offset


def scan(url: str, **options: str) -> list[dict[str, Any]]:
    """The topic's records in the bucket, as Spark's tasks read them, in order."""
    parsed = parse_options({"path": url, "subscribe": TOPIC, "splitBytes": "1", **options})
    with Bucket(parsed.store, parsed.second_store) as opened:
        splits = plan_scan(opened, parsed, EVERYTHING).splits
        batches = [
            batch for split in splits for batch in scan_split(opened, split, COLUMNS, read_committed=parsed.read_committed)
        ]
    rows = [row for batch in batches for row in batch.to_pylist() if row["partition"] == 0]
    return sorted(rows, key=lambda row: int(row["offset"]))


async def test_transactions_in_the_object_store(tmp_path: Path) -> None:
    """Ledgers move to the store when their transactions are decided, in whichever ledgers those end."""
    random = Random(7)
    async with run_cluster(tmp_path) as cluster:
        await in_thread(lambda: create_topic(cluster, TOPIC, 1, **{"local.retention.ms": "1"}))
        await until_served(cluster.broker, partition_of(cluster, TOPIC).topic_id)
        await cluster.start_tiering()
        history = TransactionalHistory(TOPIC, random)
        client = await cluster.connect()
        hanging = await append(cluster, TOPIC, transactional(99, 0, b"hanging"))
        for _ in range(8):
            for _ in range(6):
                await history.step(cluster, client)
            await log_of(cluster).seal_all()
        await history.end_all(client)
        await cluster.brokers.pop(1).kill()
        await cluster.start_broker(2)
        await until_served(cluster.broker, partition_of(cluster, TOPIC).topic_id)
        client = await cluster.connect()
        await asyncio.sleep(0.5)
        assert cold_end(cluster) <= hanging, "nothing is offloaded from the open transaction on"
        await history.check(client, hanging)
        assert await mark(client, TOPIC, 99, ABORT) == 0
        end_offset = await log_of(cluster).seal_all()
        await until(cluster.metadata, lambda: cold_end(cluster) == end_offset, WAIT_S)
        await until(cluster.metadata, lambda: not cluster.broker.reader.hot_ledgers(log_of(cluster)), WAIT_S)
        await history.check(client, end_offset)
        scanned = await in_thread(lambda: scan(cluster.store.url))
        assert [(row["offset"], row["value"]) for row in scanned] == history.committed, "Spark sees what consumers see"
        assert len(await in_thread(lambda: scan(cluster.store.url, isolationLevel="read_uncommitted"))) > len(scanned)
        await cluster.brokers.pop(2).stop()
        await cluster.start_broker(3)
        await until_served(cluster.broker, partition_of(cluster, TOPIC).topic_id)
        await history.check(await cluster.connect(), end_offset)


def test_a_transaction_without_its_marker_is_not_reported() -> None:
    """Compaction removed it: a reader that waited for the marker would skip what its producer committed later."""
    record = [Record(offset=0, timestamp_ms=0, key=b"key", value=b"value")]
    batches = [
        _placed(build_marker(ABORT, 1, 0, 0, 0), 4),
        _placed(build_batch(record), 7),
        _placed(build_marker(ABORT, 2, 0, 0, 0), 9),
    ]
    known = [(1, 0, 4), (2, 3, 5), (3, 5, 6), (3, 6, 7), (2, 8, 9), (4, 8, 12)]
    assert runs_in(batches, known) == [(1, 0), (2, 8), (4, 8)]
    assert runs_in(batches[1:], known[:1]) == []
    emptied = read_header(batches[2])._replace(record_count=0)
    write_header(batches[2], emptied)
    assert runs_in(batches, [(2, 8, 9)]) == []


def _placed(batch: bytearray, offset: int) -> bytearray:
    write_header(batch, read_header(batch)._replace(base_offset=offset))
    return batch
