"""The worker compacts cold history; readers find the next record in a gap, and no failure of a step loses a record."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.compaction_kernels import load_kernels
from support.hostile_batches import hostile_batch

from stratalog_core.batches.batch import BatchHeader, read_header
from stratalog_core.batches.compression import ZSTD
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.compiled.jit import Bools
from stratalog_core.errors import Corrupt, NotFound, Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import KEEP_METADATA, ForkDecision, TierRequest, Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.proofs import prove_batch, prove_growth
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.compaction import BatchFilter, MappedRecords
from stratalog_tiering.core.erasure import Selection
from stratalog_tiering.core.partition import partition_snapshot
from stratalog_tiering.core.policy import tier_policy
from stratalog_tiering.format.manifest import Manifest, Reason, SegmentKind
from stratalog_tiering.format.manifest_writers import OLDEST_WRITER
from stratalog_tiering.format.object_keys import manifests_prefix
from stratalog_tiering.maintenance.compaction import Compaction
from stratalog_tiering.maintenance.erasure import Erased, erase_range
from stratalog_tiering.maintenance.fork_resolution import read_lines
from stratalog_tiering.offload.ports import MapSlot, worker_ports

Cluster = Any
Rows = Sequence[tuple[str, str | None]]
LAZY = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}
"""Compacted only when asked to be."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """On a fresh checkout they are compiled, which may take longer than a test waits for its worker."""
    load_kernels()


@pytest.fixture
def topic(topic: Topic) -> Topic:
    return msgspec.structs.replace(topic, configs=LAZY)


def batches_of(base_offset: int, *rows: Rows, epoch: int = 0) -> list[bytes]:
    """One batch for each list of keys and values."""
    batches, offset = [], base_offset
    for each in rows:
        records = [
            Record(
                offset=offset + step,
                timestamp_ms=offset + step,
                key=key.encode(),
                value=None if value is None else value.encode(),
            )
            for step, (key, value) in enumerate(each)
        ]
        batches.append(bytes(build_batch(records, leader_epoch=epoch)))
        offset += len(each)
    return batches


async def cold(cluster: Cluster, *ledgers: Sequence[Rows]) -> None:
    """Offload one segment for each of ``ledgers``, by a worker that joins nothing."""
    worker = await cluster.start_worker("offloader", segment_bytes=1, block_bytes=4096)
    base = cluster.pointer().end_offset if cluster.pointer() else 0
    for epoch, ledger in enumerate(ledgers):
        batches = batches_of(base, *ledger, epoch=base + epoch)
        await cluster.add_ledger(batches, base, leader_epoch=base + epoch)
        base = read_header(batches[-1]).next_offset
    await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()


async def ask(cluster: Cluster, partition: int = 0) -> None:
    """Request a compaction, as an owner has answered it, and wait until it is done."""
    pointer = cluster.pointer(partition)
    request = TierRequest(
        topic_id=cluster.topic.topic_id, index=partition, end_offset=pointer.end_offset, delete_hot=True, compact=True
    )
    await cluster.metadata.propose(Command(updates=(Put(record=request),)))
    await cluster.until(lambda: cluster.metadata.view.get(request.key()) is None)


async def manifest_of(cluster: Cluster) -> Manifest:
    return await ManifestSource(cluster.store).manifest(cluster.pointer())


async def read_all(cluster: Cluster, from_offset: int = 0) -> dict[int, Record]:
    """All records from an offset on, read as a broker reads them."""
    reader, pointer = ColdReader(cluster.store, ColdReaderSettings(), SystemClock()), cluster.pointer()
    offset, found = from_offset, dict[int, Record]()
    while offset < pointer.end_offset:
        run = await reader.fetch(pointer, offset, 100, 10)
        assert read_header(run.batches[0]).last_offset >= offset, "a batch below the offset would stop a consumer"
        found.update((each.offset, each) for batch in run.batches for each in iterate_records(batch))
        assert run.end_offset > offset
        offset = run.end_offset
    await reader.close()
    return {offset: each for offset, each in found.items() if offset >= from_offset}


def values(records: dict[int, Record]) -> dict[int, tuple[bytes | None, bytes | None]]:
    return {offset: (each.key, each.value) for offset, each in records.items()}


LEDGERS: list[list[Rows]] = [
    [[("a", "1"), ("b", "1")], [("c", "1"), ("a", "2")]],
    [[("b", "2")], [("c", None), ("d", "1")]],
    [[("a", "3")], [("e", "1"), ("a", "4")]],
]
KEPT = {4: (b"b", b"2"), 5: (b"c", None), 6: (b"d", b"1"), 8: (b"e", b"1"), 9: (b"a", b"4")}


async def test_cold_segments_become_one_that_covers_the_same_offsets(cluster: Cluster, background: ThreadBackground) -> None:
    await cold(cluster, *LEDGERS)
    before, worker = await manifest_of(cluster), await cluster.start_worker()
    await ask(cluster)
    after = await manifest_of(cluster)
    (entry,) = after.segments
    present = entry.options.present
    assert present is not None
    assert (entry.kind, entry.base_offset, entry.end_offset) == (SegmentKind.COMPACTED, 0, 10)
    assert (entry.record_count, entry.leaf_count, entry.batch_count) == (5, 6, 3)
    assert (present.base_offset, present.end_offset, entry.options.dirty_from) == (4, 10, None)
    assert [(start.epoch, start.start_offset) for start in entry.leader_epochs] == [(0, 0), (5, 4), (9, 7)]
    assert (after.record_count, after.start_offset, after.oldest_writer) == (5, 0, OLDEST_WRITER)
    assert after.tree == before.tree
    assert [(removed.key, removed.reason) for removed in after.removed] == [
        (each.key, Reason.COMPACTED) for each in before.segments
    ]
    for offset in range(10):
        expected = {at: kept for at, kept in KEPT.items() if at >= offset}
        assert values(await read_all(cluster, offset)) == expected
    report = await Verifier(cluster.store, background).partition("flights", cluster.pointer())
    assert (report.findings, report.progress.records) == ((), 5)
    (counters,) = [group for group in worker.metrics() if group.subsystem == "tiering" and hasattr(group, "compaction_passes")]
    assert (counters.compaction_passes, counters.segments_compacted, counters.records_compacted) == (1, 3, 5)


async def test_leader_epochs_do_not_accumulate(cluster: Cluster) -> None:
    """Each takeover begins an epoch, and a key that is written often leaves one batch of them all."""
    takeovers: list[list[Rows]] = [[[("a", str(number))]] for number in range(5)]
    await cold(cluster, *takeovers)
    await cluster.start_worker()
    await ask(cluster)
    (entry,) = (await manifest_of(cluster)).segments
    assert [(start.epoch, start.start_offset) for start in entry.leader_epochs] == [(0, 0), (8, 4)]
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    assert await reader.leader_epochs(cluster.pointer()) == [(2 * number, number) for number in range(5)], (
        "clients ask for these"
    )
    await reader.close()


async def test_what_was_compacted_cannot_be_proved_and_growth_can(cluster: Cluster, background: ThreadBackground) -> None:
    await cold(cluster, *LEDGERS[:1])
    older = (await manifest_of(cluster)).tree
    await cold(cluster, *LEDGERS[1:])
    await cluster.start_worker()
    await ask(cluster)
    manifest, source = await manifest_of(cluster), ManifestSource(cluster.store)
    with pytest.raises(NotFound, match="compacted segment"):
        await prove_batch(cluster.store, source, background, manifest, 9)
    assert (await prove_growth(source, manifest, older.size)).holds(older.head)


async def test_the_time_of_a_record_is_found_behind_a_gap(cluster: Cluster) -> None:
    await cold(cluster, *LEDGERS)
    await cluster.start_worker()
    await ask(cluster)
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    for timestamp_ms, offset in ((0, 4), (4, 4), (7, 8), (9, 9)):
        found = await reader.offset_for_timestamp(cluster.pointer(), timestamp_ms)
        assert found is not None
        assert (found.offset, found.timestamp_ms) == (offset, offset)
    assert [start for _, start in await reader.leader_epochs(cluster.pointer())] == [0, 4, 7]
    await reader.close()


async def test_a_map_that_is_too_small_takes_several_passes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratalog_tiering.maintenance.compaction.KEY_BYTES", 64 * 1024 // 2)
    await cold(cluster, *LEDGERS)
    worker = await cluster.start_worker(compaction_map_bytes=64 * 1024)
    await ask(cluster)
    assert values(await read_all(cluster)) == KEPT
    (counters,) = [group for group in worker.metrics() if hasattr(group, "compaction_passes")]
    assert counters.compaction_passes > 2


async def test_history_in_pages_is_compacted_page_by_page(cluster: Cluster, background: ThreadBackground) -> None:
    ledgers = [[[("k", str(index)), (f"only-{index}", "1")]] for index in range(140)]
    await cold(cluster, *ledgers)
    before = await manifest_of(cluster)
    assert before.pages
    await cluster.start_worker()
    await ask(cluster)
    found = values(await read_all(cluster))
    assert len(found) == 141
    assert found[278] == (b"k", b"139")
    manifest = await manifest_of(cluster)
    assert sum(ref.segment_count for ref in manifest.pages) + len(manifest.segments) < 5
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def test_dirty_history_is_compacted_without_being_asked(cluster: Cluster) -> None:
    await cold(cluster, *LEDGERS)
    eager = msgspec.structs.replace(cluster.topic, configs={**LAZY, "min.cleanable.dirty.ratio": "0.4"})
    await cluster.metadata.propose(Command(updates=(Put(record=eager),)))
    await cluster.start_worker()
    version = cluster.pointer().manifest_version
    await cluster.until(lambda: cluster.pointer().manifest_version > version)
    assert values(await read_all(cluster)) == KEPT


async def test_records_with_hot_copies_are_not_compacted(cluster: Cluster) -> None:
    await cold(cluster, *LEDGERS)
    await cluster.start_worker(deletion_lag_ms=3_600_000)
    await cluster.add_ledger(batches_of(10, [("b", "3")]), 10)
    await cluster.until(lambda: cluster.pointer().end_offset == 11)
    await ask_with_hot(cluster)
    found = values(await read_all(cluster))
    assert found == {**KEPT, 10: (b"b", b"3")}


async def ask_with_hot(cluster: Cluster) -> None:
    request = TierRequest(topic_id=cluster.topic.topic_id, index=0, end_offset=10, compact=True)
    await cluster.metadata.propose(Command(updates=(Put(record=request),)))
    await cluster.until(lambda: cluster.metadata.view.get(request.key()) is None)


@pytest.mark.parametrize("call", ["put", "get_range", "head"])
async def test_a_failing_store_costs_a_new_pass_and_no_record(
    cluster: Cluster, background: ThreadBackground, call: str
) -> None:
    await cold(cluster, *LEDGERS)
    failures, seen = [1, 3, 4, 6, 9, 13], 0

    def fail(name: str, key: str) -> BaseException | None:
        nonlocal seen
        if name != call:
            return None
        seen += 1
        return Unavailable("no answer") if seen in failures else None

    cluster.store.before = fail
    await cluster.start_worker()
    await ask(cluster)
    cluster.store.before = lambda name, key: None
    assert values(await read_all(cluster)) == KEPT
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def test_a_filter_that_loses_a_record_is_noticed_before_the_commit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, store_directory: Path
) -> None:
    await cold(cluster, *LEDGERS)
    keeps, lost = BatchFilter._keeps, 8

    def loses(self: BatchFilter, header: BatchHeader, records: MappedRecords) -> Bools:
        kept = keeps(self, header, records)
        kept[records.offsets == lost] = False
        return kept

    monkeypatch.setattr(BatchFilter, "_keeps", loses)
    version = cluster.pointer().manifest_version
    await cluster.start_worker()
    request = TierRequest(topic_id=cluster.topic.topic_id, index=0, end_offset=10, compact=True)
    await cluster.metadata.propose(Command(updates=(Put(record=request),)))
    await cluster.until(lambda: "does not hold exactly the records that it must" in cluster.last_error())
    assert cluster.pointer().manifest_version == version
    monkeypatch.undo()
    await cluster.until(lambda: cluster.metadata.view.get(request.key()) is None)
    assert values(await read_all(cluster)) == KEPT


async def test_a_damaged_segment_stops_the_compaction(cluster: Cluster, store_directory: Path) -> None:
    await cold(cluster, *LEDGERS)
    entry = (await manifest_of(cluster)).segments[1]
    path = store_directory / entry.key
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)
    await cluster.start_worker()
    request = TierRequest(topic_id=cluster.topic.topic_id, index=0, end_offset=10, compact=True)
    await cluster.metadata.propose(Command(updates=(Put(record=request),)))
    await cluster.until(lambda: Corrupt.__name__ in cluster.last_error())
    assert [each.kind for each in (await manifest_of(cluster)).segments] == [SegmentKind.RAW] * 3


@pytest.mark.parametrize("kind", ["a bomb", "a length that does not end", "more records than are located"])
async def test_a_batch_that_cannot_be_read_stays_and_is_counted_and_named(
    cluster: Cluster, store_directory: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Its partition is compacted around it, and so is the other one of the worker."""
    hostile = hostile_batch(kind, ZSTD, base_offset=2)
    end = read_header(hostile).next_offset
    offloader = await cluster.start_worker("offloader", segment_bytes=1)
    for partition in range(2):
        await cluster.add_ledger(batches_of(0, [("a", "1"), ("b", "1")]), 0, partition=partition)
    await cluster.add_ledger([hostile], 2)
    await cluster.add_ledger(batches_of(end, [("a", "2")]), end)
    await cluster.add_ledger(batches_of(2, [("a", "2")]), 2, partition=1)
    await cluster.until(lambda: not (cluster.log(0).ledgers or cluster.log(1).ledgers))
    await offloader.close()
    worker = await cluster.start_worker()
    await asyncio.gather(ask(cluster, 0), ask(cluster, 1))
    (segment,) = (await manifest_of(cluster)).segments
    assert hostile in (store_directory / segment.key).read_bytes()
    pointer, reader = cluster.pointer(), ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    first, *_, last = (await reader.fetch(pointer, 0, 2**20, 10)).batches
    await reader.close()
    assert [each.key for batch in (first, last) for each in iterate_records(batch)] == [b"b", b"a"]
    assert (await ManifestSource(cluster.store).manifest(cluster.pointer(1))).record_count == 2
    (counters,) = [group for group in worker.metrics() if hasattr(group, "compaction_passes")]
    assert (counters.compaction_passes, counters.batches_not_compacted, counters.failures) == (2, 1, 0)
    assert "flights-0: compaction left 1 batches as they are" in caplog.text
    assert "the first: offset 2: " in caplog.text


async def test_a_policy_that_only_compacts_deletes_nothing(cluster: Cluster) -> None:
    old = msgspec.structs.replace(cluster.topic, configs={**LAZY, "retention.ms": "1", "retention.bytes": "1"})
    await cluster.metadata.propose(Command(updates=(Put(record=old),)))
    await cold(cluster, *LEDGERS)
    await cluster.start_worker()
    await ask(cluster)
    assert values(await read_all(cluster)) == KEPT
    both = msgspec.structs.replace(old, configs={**old.configs, "cleanup.policy": "compact,delete"})
    await cluster.metadata.propose(Command(updates=(Put(record=both),)))
    await cluster.until(lambda: cluster.log().log_start_offset == 10)


async def test_a_pass_whose_range_is_deleted_meanwhile_ends(cluster: Cluster) -> None:
    await cold(cluster, *LEDGERS)
    worker = await cluster.start_worker(deletion_lag_ms=0)
    while worker._session is None:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)
    ports, policy, compaction = worker._session._ports, tier_policy(LAZY), Compaction()

    def step() -> Awaitable[bool]:
        state = partition_snapshot(cluster.metadata.view, cluster.topic, 0)
        assert state is not None
        return compaction.step(ports, state, policy, (), is_asked=not compaction.is_running)

    assert await step()
    await cluster.add_ledger(batches_of(10, [("f", "1")]), 10)
    await cluster.until(lambda: cluster.pointer().end_offset == 11 and not cluster.log().ledgers)
    await cluster.metadata.propose(Command(updates=(Put(record=msgspec.structs.replace(cluster.log(), log_start_offset=10)),)))
    await cluster.until(lambda: cluster.pointer().start_offset == 10)
    for _ in range(2):
        assert await step()
    assert not compaction.is_running, "it fills its map with nothing, then finds nothing to rewrite"


async def test_a_pass_begins_again_after_an_erasure(cluster: Cluster) -> None:
    """The erased record was the newest one of its key, so the one before it is now, and stays."""
    newest = Record(offset=4, timestamp_ms=4, key=b"a", value=b"3", headers=(("user", b"alice"),))
    worker = await cluster.start_worker("offloader", segment_bytes=1)
    for base, batches in ((0, batches_of(0, [("a", "1"), ("b", "1")], [("a", "2")])), (3, batches_of(3, [("b", "2")]))):
        await cluster.add_ledger(batches, base)
    await cluster.add_ledger([bytes(build_batch([newest]))], 4)
    await cluster.until(
        lambda: cluster.pointer() is not None and cluster.pointer().end_offset == 5 and not cluster.log().ledgers
    )
    await worker.close()
    ports = worker_ports(
        TieringSettings(worker_id="compactor"), cluster.metadata, cluster.store, cluster.ledgers, SystemClock(),
        random.Random(6), cluster.background,
    )  # fmt: skip
    compaction = Compaction()

    async def step() -> bool:
        state = partition_snapshot(cluster.metadata.view, cluster.topic, 0)
        assert state is not None
        return await compaction.step(ports, state, tier_policy(LAZY), (), is_asked=True)

    while compaction.state.phase != "rewrite":
        assert await step()
    alice = Selection(headers=frozenset({(b"user", b"alice")}))
    (erased,) = [each async for each in erase_range(ports, cluster.topic.topic_id, 0, (0, 5), alice)]
    assert isinstance(erased, Erased)
    while not compaction.last_done_ms:
        assert await step()
    assert values(await read_all(cluster)) == {2: (b"a", b"2"), 3: (b"b", b"2")}


async def test_one_partition_has_the_map_and_the_other_waits_for_it(cluster: Cluster) -> None:
    offloader = await cluster.start_worker("offloader", segment_bytes=1)
    for partition in range(2):
        base = 0
        for ledger in LEDGERS * 3:
            batches = batches_of(base, *ledger)
            await cluster.add_ledger(batches, base, partition=partition)
            base = read_header(batches[-1]).next_offset
    await cluster.until(lambda: not (cluster.log(0).ledgers or cluster.log(1).ledgers))
    await offloader.close()
    worker = await cluster.start_worker(segment_bytes=1, partitions_at_once=2)
    await asyncio.gather(ask(cluster, 0), ask(cluster, 1))
    for partition in range(2):
        manifest = await ManifestSource(cluster.store).manifest(cluster.pointer(partition))
        assert manifest.record_count == 5
        assert {each.kind for each in manifest.segments} == {SegmentKind.COMPACTED}
        status = cluster.status(partition)
        assert (status.compacting, status.compacted_at_ms > 0, status.last_error) == ("", True, "")
    (counters,) = [group for group in worker.metrics() if hasattr(group, "compaction_passes")]
    assert (counters.compaction_passes, counters.failures) == (2, 0)


def test_a_slot_has_one_holder_until_it_is_freed() -> None:
    class Holder:
        pass

    slot, first, second = MapSlot(), Holder(), Holder()
    assert slot.take(first)
    assert slot.take(first)
    assert not slot.take(second)
    slot.free(second)
    assert not slot.take(second), "only its holder frees it"
    slot.free(first)
    assert slot.take(second)
    assert not slot.take(first)


async def _holds_nothing(name: str) -> None:
    return None


@pytest.mark.parametrize("ending", ["session", "other worker", "deleted topic"])
async def test_a_pass_that_is_left_gives_its_map_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Whatever still refers to the partition's work, as a task or a traceback does until the next garbage collection."""
    await cold(cluster, *LEDGERS)
    begun = asyncio.Event()
    left: list[tuple[Compaction, MapSlot]] = []
    begin = Compaction._begin

    async def beginning(self: Compaction, ports: Any, *others: Any, **named: Any) -> bool:
        if ending == "deleted topic" and worker._session is not None:
            worker._session._forget_topic(cluster.topic.topic_id)  # while the pass begins
        did = await begin(self, ports, *others, **named)
        if self.is_running and not left:
            left.append((self, ports.map_slot))
            begun.set()
        return did

    monkeypatch.setattr(Compaction, "_begin", beginning)
    monkeypatch.setattr("stratalog_tiering.worker.partition_work.STEPS_AT_ONCE_MAX", 1)
    worker = await cluster.start_worker()
    asking = asyncio.ensure_future(ask(cluster))
    async with asyncio.timeout(60):
        await begun.wait()
        session = worker._session
        assert session is not None
        if ending == "session":
            session.expire()
        elif ending == "other worker":
            monkeypatch.setattr(session._leases, "is_ours", lambda name: False)
            monkeypatch.setattr(session._leases, "hold", _holds_nothing)
            await asyncio.sleep(0.2)
            session._schedule_all()
            session._wake.set()
        compaction, slot = left[0]
        while slot._holder is compaction:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    asking.cancel()


async def test_compacted_segments_are_stored_as_the_topic_asks_for_now(cluster: Cluster, background: ThreadBackground) -> None:
    await cold(cluster, *LEDGERS)
    zstd = msgspec.structs.replace(cluster.topic, configs={**LAZY, "stratalog.tier.compression": "zstd"})
    await cluster.metadata.propose(Command(updates=(Put(record=zstd),)))
    await cluster.start_worker()
    await ask(cluster)
    (entry,) = (await manifest_of(cluster)).segments
    assert (await ManifestSource(cluster.store).footer(entry)).block_compression == "zstd"
    assert values(await read_all(cluster)) == KEPT
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def test_a_clean_segment_without_superseded_records_is_not_written_again(cluster: Cluster) -> None:
    large = "x" * 3_000
    await cold(cluster, [[(f"old-{index}", large) for index in range(3)]], [[("a", large)]])
    worker = await cluster.start_worker(segment_bytes=5_000)
    await ask(cluster)
    first, _ = before = (await manifest_of(cluster)).segments
    await worker.close()
    await cold(cluster, [[("a", "2")]])
    worker = await cluster.start_worker(segment_bytes=5_000)
    await ask(cluster)
    after = (await manifest_of(cluster)).segments
    assert after[0] == first
    assert after[1] != before[1]
    assert [each.is_compacted for each in after] == [True, True]
    assert sorted(await read_all(cluster)) == [0, 1, 2, 4]
    (counters,) = [group for group in worker.metrics() if hasattr(group, "compaction_passes")]
    assert (counters.compaction_passes, counters.segments_compacted) == (1, 2)


async def test_a_pass_ends_when_a_fork_is_resolved(cluster: Cluster) -> None:
    """Its map is of records that the kept history never had."""
    await cold(cluster, [[("a", "1")]])
    restored = cluster.pointer()
    await cold(cluster, [[("b", "1"), ("a", "2")]])
    worker = await cluster.start_worker(deletion_lag_ms=0)
    while worker._session is None:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)
    ports, policy, compaction = worker._session._ports, tier_policy(LAZY), Compaction()

    async def step() -> bool:
        state = partition_snapshot(cluster.metadata.view, cluster.topic, 0)
        assert state is not None
        return await compaction.step(ports, state, policy, (), is_asked=not compaction.is_running)

    for _ in range(3):  # it begins, and reads both segments
        assert await step()
    assert compaction.state.phase == "rewrite"
    await cluster.metadata.propose(Command(updates=(Put(record=restored),)))
    lines = await read_lines(cluster.store, manifests_prefix(cluster.topic.topic_id, 0), restored)
    assert lines is not None
    decision = ForkDecision(
        topic_id=cluster.topic.topic_id, index=0, keep=KEEP_METADATA, metadata_key=lines.fork.metadata_key,
        store_key=lines.fork.store_key,
    )  # fmt: skip
    await cluster.metadata.propose(Command(updates=(Put(record=decision),)))
    await cluster.until(lambda: cluster.metadata.view.get(decision.key()) is None)
    await cluster.add_ledger(batches_of(1, [("c", "1"), ("d", "1")]), 1, leader_epoch=1)
    await cluster.until(lambda: cluster.pointer().end_offset == 3 and not cluster.log().ledgers)
    while compaction.is_running:
        await step()
    assert values(await read_all(cluster)) == {0: (b"a", b"1"), 1: (b"c", b"1"), 2: (b"d", b"1")}


@pytest.mark.parametrize("failing", ["apply_retention", "ensure_in_store", "cold_since", "resolve_fork"])
async def test_a_pass_that_cannot_go_on_gives_its_map_to_another_partition(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """What comes before the pass's next step fails each time."""
    eager = msgspec.structs.replace(cluster.topic, configs={**LAZY, "min.cleanable.dirty.ratio": "0.1"})
    offloader = await cluster.start_worker("offloader", segment_bytes=1)
    for partition in range(2):
        await cluster.add_ledger(batches_of(0, [("a", "1"), ("a", "2")]), 0, partition=partition)
    await cluster.until(lambda: not (cluster.log(0).ledgers or cluster.log(1).ledgers))
    await offloader.close()
    await cluster.metadata.propose(Command(updates=(Put(record=eager),)))
    begin, first = Compaction._begin, list[int]()
    module = "stratalog_tiering.worker.partition_work"
    succeeding = getattr(importlib.import_module(module), failing)

    async def beginning(self: Compaction, ports: Any, state: Any, *others: Any, **named: Any) -> bool:
        did = await begin(self, ports, state, *others, **named)
        if self.is_running and not first:
            first.append(state.log.index)
            if failing == "resolve_fork":
                decision = ForkDecision(
                    topic_id=eager.topic_id, index=first[0], keep=KEEP_METADATA, metadata_key="m", store_key="s"
                )
                await cluster.metadata.propose(Command(updates=(Put(record=decision),)))
        return did

    async def fail(ports: Any, concerned: Any, *others: Any, **named: Any) -> Any:
        index = concerned.index if failing == "ensure_in_store" else concerned.log.index
        if first == [index]:
            raise Corrupt("a page of this partition is damaged")
        return await succeeding(ports, concerned, *others, **named)

    monkeypatch.setattr(Compaction, "_begin", beginning)
    monkeypatch.setattr(f"{module}.{failing}", fail)
    await cluster.start_worker()
    await cluster.until(lambda: bool(first) and "damaged" in cluster.last_error(first[0]))
    other = 1 - first[0]
    await cluster.until(lambda: (status := cluster.status(other)) is not None and status.compacted_at_ms > 0, 20)
