"""Records are erased from cold history, and every other batch, every offset and every earlier proof stays as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.hostile_batches import hostile_batch

from stratalog_core.batches.batch import (
    CONTROL_BIT,
    HEADER_BYTES,
    TRANSACTIONAL_BIT,
    BatchHeader,
    read_header,
    write_header,
)
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.errors import Corrupt, NotFound, OutcomeUnknown, Unavailable
from stratalog_core.ports import Buffer
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import TierRequest, Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.lease import HeldLease, LeaseExpired
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.proofs import prove_batch, prove_growth
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.erasure import EraseFilter, Selection
from stratalog_tiering.core.rewritten_batches import Filtered
from stratalog_tiering.format.manifest import Manifest, Reason, SegmentKind
from stratalog_tiering.format.manifest_writers import WRITER_VERSION
from stratalog_tiering.format.object_keys import LEASES_PREFIX
from stratalog_tiering.maintenance import erasure, orphans, segment_replacements
from stratalog_tiering.maintenance.erasure import Erased, erase_range
from stratalog_tiering.maintenance.segment_replacements import SegmentKept
from stratalog_tiering.offload.commit import commit_edit
from stratalog_tiering.offload.locks import KnownLocks, locked_entry
from stratalog_tiering.offload.ports import WorkerPorts, worker_ports
from stratalog_tiering.offload.reader_leases import leases_in_force
from stratalog_tiering.store import ObjectStore
from stratalog_tiering.worker.collection import UNCOMMITTED_MS, CollectorPorts, delete_due, find_all

Cluster = Any
ALICE = Selection(keys=frozenset({b"alice"}), headers=frozenset({(b"user", b"alice")}))


def batch_of(base: int, *keys: str, headers: Sequence[tuple[str, bytes | None]] = (), **options: int) -> bytes:
    records = [
        Record(offset=base + n, timestamp_ms=1000 + base + n, key=key.encode(), value=b"v" * 30, headers=tuple(headers))
        for n, key in enumerate(keys)
    ]
    return bytes(build_batch(records, **options))


SEGMENTS = [
    [
        batch_of(0, "alice", "bob", "carol", compression=4),
        batch_of(3, "bob", "dave"),
        batch_of(5, "alice", producer_id=7, producer_epoch=0, base_sequence=0),
    ],
    [batch_of(6, "bob", "erin"), batch_of(8, "dave", headers=[("trace", None), ("user", b"alice")])],
    [batch_of(9, "bob", "carol", headers=[("user", b"bob"), ("alice", b"user")])],
]
"""Three segments. In the third, the name of the header and its value are the other way round."""
LEFT = {1: b"bob", 2: b"carol", 3: b"bob", 4: b"dave", 6: b"bob", 7: b"erin", 9: b"bob", 10: b"carol"}


async def cold(cluster: Cluster, segments: Sequence[Sequence[bytes]]) -> None:
    worker = await cluster.start_worker("offloader", segment_bytes=1, block_bytes=100)
    for batches in segments:
        await cluster.add_ledger(batches, read_header(batches[0]).base_offset)
    await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()


def ports_of(cluster: Cluster) -> WorkerPorts:
    return worker_ports(
        TieringSettings(worker_id="job-erase", block_bytes=100), cluster.metadata, cluster.store, cluster.ledgers,
        SystemClock(), random.Random(), cluster.background,
    )  # fmt: skip


async def erase(cluster: Cluster, selection: Selection = ALICE) -> list[Erased | SegmentKept]:
    end = cluster.pointer().end_offset
    return [each async for each in erase_range(ports_of(cluster), cluster.topic.topic_id, 0, (0, end), selection)]


def collector_of(cluster: Cluster) -> CollectorPorts:
    return CollectorPorts(
        metadata=cluster.metadata, store=cluster.store, source=ManifestSource(cluster.store), locks=KnownLocks(cluster.store)
    )


class ShiftedClock(SystemClock):
    """The system's clock, ``later_s`` later."""

    later_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.later_s


async def manifest_of(cluster: Cluster) -> Manifest:
    return await ManifestSource(cluster.store).manifest(cluster.pointer())


async def batches_in(cluster: Cluster) -> list[bytes]:
    """All batches, read as a broker reads them."""
    reader, pointer, found = ColdReader(cluster.store, ColdReaderSettings(), SystemClock()), cluster.pointer(), list[bytes]()
    offset = pointer.start_offset
    while offset < pointer.end_offset:
        run = await reader.fetch(pointer, offset, 1, 1)
        found += [bytes(batch) for batch in run.batches]
        offset = run.end_offset
    await reader.close()
    return found


async def keys_in(cluster: Cluster) -> dict[int, bytes | None]:
    return {each.offset: each.key for batch in await batches_in(cluster) for each in iterate_records(batch)}


async def test_selected_records_go_and_everything_else_stays(cluster: Cluster, background: ThreadBackground) -> None:
    await cold(cluster, SEGMENTS)
    before, originals = await manifest_of(cluster), await batches_in(cluster)
    first, second = await erase(cluster)
    assert isinstance(first, Erased)
    assert isinstance(second, Erased)
    assert (first.records, first.altered_batches, first.identical_batches) == (2, 2, 1)
    assert (second.records, second.altered_batches, second.identical_batches) == (1, 1, 1)
    after = await manifest_of(cluster)
    assert [each.kind for each in after.segments] == [SegmentKind.ERASED, SegmentKind.ERASED, SegmentKind.RAW]
    assert after.segments[2] == before.segments[2]
    assert (after.record_count, after.tree, after.oldest_writer) == (8, before.tree, WRITER_VERSION)
    assert (before.erased_version, after.erased_version, cluster.pointer().erased_version) == (0, after.version, after.version)
    assert [(each.key, each.reason) for each in after.removed] == [(each.key, Reason.ERASED) for each in before.segments[:2]]
    assert await keys_in(cluster) == LEFT
    left = await batches_in(cluster)
    assert [a == b for a, b in zip(originals, left, strict=True)] == [False, True, False, True, False, True]
    for old, new in zip(map(read_header, originals), map(read_header, left), strict=True):
        assert (new.base_offset, new.last_offset, new.leader_epoch) == (old.base_offset, old.last_offset, old.leader_epoch)
        assert (new.producer_id, new.base_sequence) == (old.producer_id, old.base_sequence)
    report = await Verifier(cluster.store, background).partition("flights", cluster.pointer())
    assert (report.findings, report.progress.records) == ((), 8)


async def test_earlier_proofs_hold_and_untouched_batches_can_still_be_proved(
    cluster: Cluster, background: ThreadBackground
) -> None:
    await cold(cluster, SEGMENTS[:2])
    older, untouched = await manifest_of(cluster), SEGMENTS[0][1]
    proof = await prove_batch(cluster.store, ManifestSource(cluster.store), background, older, 3)
    await erase(cluster)
    await cold(cluster, SEGMENTS[2:])
    manifest, source = await manifest_of(cluster), ManifestSource(cluster.store)
    assert (await prove_growth(source, manifest, older.tree.size)).holds(older.tree.head)
    assert proof.holds(untouched)
    assert (await prove_batch(cluster.store, source, background, manifest, 3)).holds(untouched)
    with pytest.raises(NotFound, match="records were erased from the batch of offset 1"):
        await prove_batch(cluster.store, source, background, manifest, 1)


async def test_a_second_request_erases_more_of_an_erased_segment(cluster: Cluster, background: ThreadBackground) -> None:
    await cold(cluster, SEGMENTS)
    await erase(cluster)
    assert await erase(cluster) == [], "the same request again finds nothing"
    await erase(cluster, Selection(keys=frozenset({b"bob"})))
    assert set((await keys_in(cluster)).values()) == {b"carol", b"dave", b"erin"}
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def test_hot_locked_and_shared_segments_are_refused(cluster: Cluster) -> None:
    await cold(cluster, SEGMENTS[:1])
    (entry,) = (await manifest_of(cluster)).segments
    assert erasure.reason_to_keep(entry, 6, 0) is None
    hot = erasure.reason_to_keep(entry, 4, 0)
    assert hot is not None
    assert hot.reason == "offsets from 4 on still have hot copies"
    locked = msgspec.structs.replace(entry, options=msgspec.structs.replace(entry.options, lock_until_ms=50))
    refused = erasure.reason_to_keep(locked, 6, 49)
    assert refused is not None
    assert refused.lock_until_ms == 50
    assert erasure.reason_to_keep(locked, 6, 50) is None
    shared = msgspec.structs.replace(entry, object_bytes=entry.object_bytes + 1)
    assert erasure.reason_to_keep(shared, 6, 0) is not None


async def test_segments_with_hot_copies_are_left_and_named(cluster: Cluster) -> None:
    worker = await cluster.start_worker("keeper", segment_bytes=1, deletion_lag_ms=3_600_000)
    await cluster.add_ledger(SEGMENTS[0], 0)
    await cluster.until(lambda: cluster.pointer() is not None)
    await worker.close()
    (refused,) = await erase(cluster)
    assert isinstance(refused, SegmentKept)
    assert refused.reason == "offsets from 0 on still have hot copies"
    assert [each.kind for each in (await manifest_of(cluster)).segments] == [SegmentKind.RAW]


async def test_batches_that_cannot_be_read_stay_byte_identical(cluster: Cluster, background: ThreadBackground) -> None:
    unreadable = hostile_batch("a length beyond the batch", 0, base_offset=3)
    named = batch_of(4, "alice")
    assert b"alice" not in unreadable, "that is certain, so this batch needs no report"
    broken = bytearray(batch_of(5, "alice"))
    broken[HEADER_BYTES] = 2 * 60  # the record's length
    write_header(broken, read_header(broken))
    segments = [[batch_of(0, "alice", "bob", "carol"), unreadable, named, bytes(broken)], [bytes(batch_of(6, "bob"))]]
    await cold(cluster, segments)
    (done,) = await erase(cluster)
    assert isinstance(done, Erased)
    assert (done.records, done.altered_batches, done.identical_batches, done.unreadable_batches) == (2, 2, 2, 1)
    left = await batches_in(cluster)
    assert left[1] == segments[0][1]
    assert left[3] == segments[0][3]
    assert [each.key for batch in (left[0], left[2]) for each in iterate_records(batch)] == [b"bob", b"carol"]
    assert await erase(cluster) == [], "what cannot be read is not found again"
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


def lose_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Selection, "selects", lambda self, spans, row: spans.key(row) in (b"alice", b"carol"))


def replace_batch(monkeypatch: pytest.MonkeyPatch, base_offset: int, other: bytes) -> None:
    """Have the filter return ``other`` in the place of the batch at an offset."""
    filtered = EraseFilter.filter

    def wrong(self: EraseFilter, batch: Buffer, header: BatchHeader, *, is_last: bool) -> Filtered:
        found = filtered(self, batch, header, is_last=is_last)
        return Filtered(batch=other, fingerprint=0) if header.base_offset == base_offset else found

    monkeypatch.setattr(EraseFilter, "filter", wrong)


def keep_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_batch(monkeypatch, 0, SEGMENTS[0][0])


def alter_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_batch(monkeypatch, 3, batch_of(3, "bob", "mallory"))


@pytest.mark.parametrize("fault", [lose_a_record, keep_a_record, alter_another_batch])
async def test_a_wrong_filter_is_noticed_before_the_commit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    await cold(cluster, SEGMENTS[:1])
    before = cluster.pointer()
    fault(monkeypatch)
    with pytest.raises(Corrupt, match="is not what it must be"):
        await erase(cluster)
    assert cluster.pointer() == before


@pytest.mark.parametrize("call", ["put", "complete_upload", "create_upload", "get", "get_range", "head", "list"])
async def test_a_failure_at_any_step_loses_nothing(cluster: Cluster, background: ThreadBackground, call: str) -> None:
    await cold(cluster, SEGMENTS)
    number = 0
    while True:
        number += 1
        seen, keys = 0, await keys_in(cluster)

        def fail(name: str, key: str, at: int = number) -> BaseException | None:
            nonlocal seen
            seen += name == call
            return Unavailable("away") if name == call and seen == at else None

        cluster.store.before = fail
        try:
            await erase(cluster)
        except (Unavailable, OutcomeUnknown):
            is_over = False
        else:
            is_over = True
        cluster.store.before = lambda name, key: None
        assert set(LEFT) <= set(await keys_in(cluster)) <= set(keys)
        if is_over or number > 60:
            break
    assert await keys_in(cluster) == LEFT
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def test_a_lost_race_begins_again(cluster: Cluster) -> None:
    await cold(cluster, SEGMENTS)
    raced = False
    original = cluster.metadata.propose

    async def propose(command: Command, *args: Any, **more: Any) -> Any:
        nonlocal raced
        if not raced and any(
            isinstance(getattr(update, "record", None), type(cluster.pointer())) for update in command.updates
        ):
            raced = True
            pointer = cluster.pointer()
            await original(Command(updates=(Put(record=pointer),)))
        return await original(command, *args, **more)

    cluster.metadata.propose = propose
    await erase(cluster)
    assert raced
    assert await keys_in(cluster) == LEFT


async def test_a_sweep_leaves_what_is_about_to_be_committed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short its grace period is: to a worker, and to `stratalog tier gc`, the new segment is an orphan until then."""
    await cold(cluster, SEGMENTS)
    swept = list[str]()

    async def swept_before(*arguments: Any) -> bool:
        (found,) = await find_all(collector_of(cluster), [cluster.topic], 0, SystemClock().wall_ms() + 1)
        swept.extend(garbage.reason for garbage in (*found.due, *found.waiting))
        await cluster.store.delete([garbage.key for garbage in found.due])
        return await commit_edit(*arguments)

    monkeypatch.setattr(segment_replacements, "commit_edit", swept_before)
    await erase(cluster)
    assert "orphan" in swept
    assert await keys_in(cluster) == LEFT


async def test_a_sweep_that_sees_no_lease_any_more_sees_the_commit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cold(cluster, SEGMENTS[:1])
    refused = list[str]()

    async def swept_during(*arguments: Any) -> bool:
        async def late(store: ObjectStore, now_ms: int) -> Any:
            await commit_edit(*arguments)
            await store.delete([info.key async for info in store.list(LEASES_PREFIX)])
            return await leases_in_force(store, now_ms)

        monkeypatch.setattr(orphans, "leases_in_force", late)
        found = await find_all(collector_of(cluster), [cluster.topic], 0, SystemClock().wall_ms() + 1)
        refused.extend(each.refused for each in found)
        return True

    monkeypatch.setattr(segment_replacements, "commit_edit", swept_during)
    await erase(cluster)
    assert ["has changed while its objects were listed" in each for each in refused] == [True]


async def test_a_commit_that_began_before_a_sweep_fails(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the command is stopped between the look at its lease and its commit until the lease has expired."""
    await cold(cluster, SEGMENTS)
    swept, outcomes = list[str](), list[bool]()

    async def swept_before(*arguments: Any) -> bool:
        if not swept:
            await cluster.store.delete([info.key async for info in cluster.store.list(LEASES_PREFIX)])
            found = await find_all(collector_of(cluster), [cluster.topic], 0, SystemClock().wall_ms() + 1 + UNCOMMITTED_MS)
            swept.extend(garbage.reason for each in found for garbage in each.due)
            await delete_due(cluster.metadata, cluster.store, found)
        outcomes.append(await commit_edit(*arguments))
        return outcomes[-1]

    monkeypatch.setattr(segment_replacements, "commit_edit", swept_before)
    await erase(cluster)
    assert "orphan" in swept
    assert outcomes == [False, True, True]
    assert await keys_in(cluster) == LEFT


async def test_nothing_is_committed_that_may_have_been_swept(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the command is stopped between the upload and the commit for longer than its lease lasts."""
    await cold(cluster, SEGMENTS)
    before, ports, clock = cluster.pointer(), ports_of(cluster), ShiftedClock()

    async def late(*arguments: Any) -> Any:
        clock.later_s = 7200.0
        return await locked_entry(*arguments)

    monkeypatch.setattr(erasure, "locked_entry", late)
    erased = erase_range(replace(ports, clock=clock), cluster.topic.topic_id, 0, (0, before.end_offset), ALICE)
    with pytest.raises(LeaseExpired):
        await anext(erased)
    assert cluster.pointer() == before


async def test_control_batches_are_never_touched(cluster: Cluster) -> None:
    batch = batch_of(0, "alice", "bob", attributes=TRANSACTIONAL_BIT, producer_id=9, producer_epoch=0, base_sequence=0)
    marker = build_batch(
        [Record(offset=2, timestamp_ms=5, key=b"\x00\x00\x00\x01", value=b"\x00" * 6)],
        attributes=TRANSACTIONAL_BIT | CONTROL_BIT, producer_id=9, producer_epoch=0,
    )  # fmt: skip
    await cold(cluster, [[batch, bytes(marker)]])
    everything = Selection(keys=frozenset({b"alice", b"\x00\x00\x00\x01"}))
    (done,) = await erase(cluster, everything)
    assert isinstance(done, Erased)
    assert done.records == 1
    assert bytes(marker) in await batches_in(cluster)


class TestCompactedTopic:
    @pytest.fixture
    def topic(self, topic: Topic) -> Topic:
        return msgspec.structs.replace(topic, configs={"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"})

    async def test_compacted_segments_are_erased_and_compacted_again(
        self, cluster: Cluster, background: ThreadBackground
    ) -> None:
        await cold(cluster, SEGMENTS)
        await cluster.start_worker()
        await compact(cluster)
        (compacted,) = (await manifest_of(cluster)).segments
        kept = await keys_in(cluster)
        (done,) = await erase(cluster)
        assert isinstance(done, Erased)
        (entry,) = (await manifest_of(cluster)).segments
        assert (entry.kind, entry.is_compacted, entry.leaf_count) == (SegmentKind.ERASED, True, compacted.leaf_count)
        assert entry.options.present == compacted.options.present
        left = {offset: key for offset, key in kept.items() if key != b"alice" and offset != 8}
        assert await keys_in(cluster) == left
        assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()
        await cold(cluster, [[batch_of(11, "erin", "frank")]])
        await compact(cluster)
        assert await keys_in(cluster) == {o: k for o, k in left.items() if k != b"erin"} | {11: b"erin", 12: b"frank"}
        assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def compact(cluster: Cluster) -> None:
    request = TierRequest(
        topic_id=cluster.topic.topic_id, index=0, end_offset=cluster.pointer().end_offset, delete_hot=True, compact=True
    )
    await cluster.metadata.propose(Command(updates=(Put(record=request),)))
    await cluster.until(lambda: cluster.metadata.view.get(request.key()) is None)


async def test_replaced_objects_stay_under_a_lease(cluster: Cluster) -> None:
    """As `stratalog job erase --delete-now` asks: with no grace period, nothing goes that a reader may still read."""
    await cold(cluster, SEGMENTS[:1])
    lease = HeldLease(cluster.store, SystemClock(), 1, "reader", [cluster.topic.topic_id], 60_000)
    await lease.acquire()
    await erase(cluster)
    (found,) = await find_all(collector_of(cluster), [cluster.topic], 0, SystemClock().wall_ms() + 1)
    assert [(each.reason, each.lease) for each in found.waiting if each.reason == Reason.ERASED] == [(Reason.ERASED, "reader")]
    assert not [each for each in found.due if each.reason == Reason.ERASED]
    await lease.release()
    (found,) = await find_all(collector_of(cluster), [cluster.topic], 0, SystemClock().wall_ms() + 1)
    assert len([each for each in found.due if each.reason == Reason.ERASED]) == 1
