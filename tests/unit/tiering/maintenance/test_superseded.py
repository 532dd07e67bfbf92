"""Superseded records are removed from cold segments beside workers that compact, and nothing else is lost at any step."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from support.compaction_kernels import load_kernels
from support.superseded import offset_set, superseded_offsets
from unit.tiering.maintenance.test_compaction import LAZY, LEDGERS, Rows, ask, batches_of, cold, manifest_of, read_all, values
from unit.tiering.maintenance.test_erasure import ShiftedClock

from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader, read_header
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, Invalid, OutcomeUnknown, Unavailable
from stratalog_core.ports import Buffer
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.lease import LeaseExpired
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.compaction_plan import superseded_until
from stratalog_tiering.core.erasure import Selection
from stratalog_tiering.core.partition import partition_snapshot
from stratalog_tiering.core.policy import CompactionPolicy, tier_policy
from stratalog_tiering.core.rewritten_batches import Filtered
from stratalog_tiering.core.superseded import SupersededFilter
from stratalog_tiering.format.manifest import Reason, SegmentKind
from stratalog_tiering.maintenance import segment_replacements, superseded
from stratalog_tiering.maintenance.compaction import Compaction
from stratalog_tiering.maintenance.erasure import erase_range
from stratalog_tiering.maintenance.segment_replacements import SegmentKept
from stratalog_tiering.maintenance.superseded import Compacted, HistoryRead, history_to_read, remove_superseded
from stratalog_tiering.offload.commit import commit_edit
from stratalog_tiering.offload.locks import locked_entry
from stratalog_tiering.offload.ports import WorkerPorts, worker_ports

Cluster = Any
NEWEST = {4: (b"b", b"2"), 5: (b"c", None), 6: (b"d", b"1"), 8: (b"e", b"1"), 9: (b"a", b"4")}
"""Of ``LEDGERS``, by a look at them."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels()


@pytest.fixture
def topic(topic: Topic) -> Topic:
    return msgspec.structs.replace(topic, configs=LAZY)


def ports_of(cluster: Cluster, clock: SystemClock | None = None) -> WorkerPorts:
    return worker_ports(
        TieringSettings(worker_id="job-compact", block_bytes=100), cluster.metadata, cluster.store, cluster.ledgers,
        clock or SystemClock(), random.Random(), cluster.background,
    )  # fmt: skip


async def found_in(cluster: Cluster) -> tuple[HistoryRead, set[int]]:
    read = await history_to_read(ports_of(cluster), cluster.topic.topic_id, 0)
    newest, gone = dict[bytes, int](), set[int]()
    for offset, record in sorted((await read_all(cluster)).items()):
        if offset < read.end_offset and record.key is not None:
            if record.key in newest:
                gone.add(newest[record.key])
            newest[record.key] = offset
    return read, gone


async def remove(cluster: Cluster, read: HistoryRead, gone: set[int]) -> list[Compacted | SegmentKept]:
    removal = remove_superseded(ports_of(cluster), cluster.topic.topic_id, 0, read, offset_set(gone))
    return [each async for each in removal]


async def compact(cluster: Cluster) -> list[Compacted | SegmentKept]:
    return await remove(cluster, *await found_in(cluster))


async def require_sound(cluster: Cluster, background: ThreadBackground) -> None:
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def set_configs(cluster: Cluster, **configs: str) -> None:
    cluster.topic = msgspec.structs.replace(
        cluster.topic, configs={**LAZY, **{k.replace("_", "."): v for k, v in configs.items()}}
    )
    await cluster.metadata.propose(Command(updates=(Put(record=cluster.topic),)))


async def test_superseded_records_go_and_workers_find_the_rest_dirty(cluster: Cluster, background: ThreadBackground) -> None:
    await cold(cluster, *LEDGERS)
    before = await manifest_of(cluster)
    done = await compact(cluster)
    assert [each.records for each in done if isinstance(each, Compacted)] == [4, 1]
    after = await manifest_of(cluster)
    assert [each.kind for each in after.segments] == [SegmentKind.COMPACTED, SegmentKind.RAW, SegmentKind.COMPACTED]
    assert [each.options.dirty_from for each in after.segments] == [0, None, 7]
    assert [(each.base_offset, each.end_offset) for each in after.segments] == [(0, 4), (4, 7), (7, 10)]
    assert after.tree == before.tree
    assert [each.reason for each in after.removed] == [Reason.COMPACTED] * 2
    assert values(await read_all(cluster)) == NEWEST
    await require_sound(cluster, background)
    version = after.version
    assert await compact(cluster) == []
    assert (await manifest_of(cluster)).version == version, "a second run changes nothing"
    await cluster.start_worker()
    await ask(cluster)
    (entry,) = (await manifest_of(cluster)).segments
    assert entry.options.dirty_from is None
    assert values(await read_all(cluster)) == NEWEST
    await require_sound(cluster, background)


async def test_what_a_worker_has_compacted_stays_clean(cluster: Cluster, background: ThreadBackground) -> None:
    await cold(cluster, *LEDGERS)
    worker = await cluster.start_worker()
    await ask(cluster)
    await worker.close()
    await cold(cluster, [[("a", "5"), ("b", None)]])
    (done,) = await compact(cluster)
    assert isinstance(done, Compacted)
    assert (done.records, done.entry.options.dirty_from, done.entry.base_offset) == (2, None, 0)
    assert set(await read_all(cluster)) == {5, 6, 8, 10, 11}
    await require_sound(cluster, background)


STEPS = 12


@pytest.mark.parametrize("at", range(STEPS))
async def test_a_pass_of_a_worker_goes_on_around_a_removal(cluster: Cluster, background: ThreadBackground, at: int) -> None:
    """The removal commits before step ``at`` of the pass, with what was found before the pass began."""
    await cold(cluster, *LEDGERS, [[("c", "2"), ("d", None)]], [[("d", None), ("f", "1")]])
    read, gone = await found_in(cluster)
    ports, passed, policy = (
        ports_of(cluster),
        Compaction(),
        tier_policy({**LAZY, "delete.retention.ms": "0", "stratalog.tier.segment.bytes": "1"}),
    )
    steps = 0
    for _ in range(3):
        is_asked = True
        while True:
            if steps == at:
                await remove(cluster, read, gone)
            state = partition_snapshot(cluster.metadata.view, cluster.topic, 0)
            assert state is not None
            if not await passed.step(ports, state, policy, (), is_asked=is_asked):
                break
            steps, is_asked = steps + 1, False
            table = {each.key: each.value for _, each in sorted((await read_all(cluster)).items())}
            left = {key: value for key, value in table.items() if value is not None}
            assert left == {b"a": b"4", b"b": b"2", b"c": b"2", b"e": b"1", b"f": b"1"}, f"after step {steps}"
    assert steps > at
    await require_sound(cluster, background)


async def test_a_removal_goes_on_around_passes_of_a_worker(
    cluster: Cluster, background: ThreadBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first commit, a worker compacts everything into one segment: the commit fails, and it looks again."""
    await cold(cluster, *LEDGERS, [[("c", "2"), ("d", None)]])
    read, gone = await found_in(cluster)
    compacted = False

    async def later(*arguments: Any) -> bool:
        nonlocal compacted
        if not compacted:
            compacted = True
            worker = await cluster.start_worker()
            await ask(cluster)
            await worker.close()
        return await commit_edit(*arguments)

    monkeypatch.setattr(segment_replacements, "commit_edit", later)
    assert await remove(cluster, read, gone) == []
    assert compacted
    assert set(await read_all(cluster)) == {4, 8, 9, 10, 11}
    await require_sound(cluster, background)


async def test_aborted_records_supersede_nothing_and_stay_listed(cluster: Cluster, background: ThreadBackground) -> None:
    producer = {"producer_id": 9, "producer_epoch": 0}
    aborted = build_batch(
        [Record(offset=1, timestamp_ms=1, key=b"a", value=b"2")], attributes=TRANSACTIONAL_BIT, base_sequence=0, **producer
    )  # fmt: skip
    marker = build_batch(
        [Record(offset=2, timestamp_ms=2, key=b"\x00\x00\x00\x00", value=bytes(6))],
        attributes=TRANSACTIONAL_BIT | CONTROL_BIT, **producer,
    )  # fmt: skip
    first, rest = batches_of(0, [("a", "1")]), batches_of(3, [("b", "1"), ("b", "2")])
    worker = await cluster.start_worker("offloader", segment_bytes=1)
    await cluster.add_ledger([*first, bytes(aborted), bytes(marker), *rest], 0)
    await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()
    ports, manifest = ports_of(cluster), await manifest_of(cluster)
    listed = (await ports.source.footer(manifest.segments[0])).aborted_transactions
    assert [each.first_offset for each in listed] == [1]
    gone = superseded_offsets([*first, aborted, marker, *rest], listed)
    assert gone == {3}
    read = await history_to_read(ports, cluster.topic.topic_id, 0)
    (done,) = await remove(cluster, read, gone)
    assert isinstance(done, Compacted)
    assert (await ports.source.footer(done.entry)).aborted_transactions == listed
    assert set(await read_all(cluster)) == {0, 1, 2, 4}
    await cluster.start_worker()
    await ask(cluster)
    assert {offset: each.value for offset, each in (await read_all(cluster)).items() if offset != 2} == {0: b"1", 4: b"2"}
    await require_sound(cluster, background)


async def test_only_history_without_hot_copies_and_old_enough_is_looked_at(cluster: Cluster) -> None:
    await cold(cluster, *LEDGERS)
    segments, policy = (await manifest_of(cluster)).segments, CompactionPolicy(lag_ms_min=100)
    newest_ms = [each.max_timestamp_ms for each in segments]
    assert superseded_until(segments, CompactionPolicy(), 10, 0) == 10
    assert superseded_until(segments, CompactionPolicy(), 9, 0) == 7
    assert superseded_until(segments, CompactionPolicy(), 3, 0) is None
    assert superseded_until(segments, policy, 10, newest_ms[1] + 100) == 7
    options = msgspec.structs.replace(segments[0].options, lock_until_ms=2**60)
    locked = [msgspec.structs.replace(segments[0], options=options), *segments[1:]]
    assert superseded_until(locked, CompactionPolicy(), 10, 0) == 10


async def test_a_locked_segment_stays_and_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cold(cluster, *LEDGERS)
    read, gone = await found_in(cluster)
    original = superseded._reason_to_keep

    def refused(entry: Any, *rest: Any) -> SegmentKept | None:
        if entry.base_offset == 0:
            entry = msgspec.structs.replace(entry, options=msgspec.structs.replace(entry.options, lock_until_ms=2**60))
        return original(entry, *rest)

    monkeypatch.setattr(superseded, "_reason_to_keep", refused)
    first, second = await remove(cluster, read, gone)
    assert isinstance(first, SegmentKept)
    assert (first.lock_until_ms, first.reason) == (2**60, "it is locked")
    assert isinstance(second, Compacted)
    assert set(await read_all(cluster)) == {0, 1, 2, 3, *NEWEST}


async def test_a_partition_without_cold_history_has_nothing_to_read(cluster: Cluster) -> None:
    read = await history_to_read(ports_of(cluster), cluster.topic.topic_id, 0)
    assert (read.start_offset, read.end_offset, read.segments) == (0, 0, ())


async def test_a_topic_that_is_not_compacted_is_refused(cluster: Cluster) -> None:
    await cold(cluster, *LEDGERS)
    read, gone = await found_in(cluster)
    await set_configs(cluster, cleanup_policy="delete")
    with pytest.raises(Invalid, match="not compacted"):
        await history_to_read(ports_of(cluster), cluster.topic.topic_id, 0)
    (refused,) = await remove(cluster, read, gone)
    assert isinstance(refused, SegmentKept)
    assert refused.reason == "the topic is no longer compacted"


async def test_a_lag_that_was_set_meanwhile_counts(cluster: Cluster) -> None:
    await cold(cluster, *LEDGERS)
    read, gone = await found_in(cluster)
    await set_configs(cluster, min_compaction_lag_ms=str(SystemClock().wall_ms() + 3_600_000))
    refused = await remove(cluster, read, gone)
    assert {each.reason for each in refused if isinstance(each, SegmentKept)} == {"min.compaction.lag.ms keeps it"}
    assert set(await read_all(cluster)) == set(range(10))


async def test_after_an_erasure_what_was_found_does_not_count(cluster: Cluster) -> None:
    """It has erased the newer record, and the older one is the newest now."""
    await cold(cluster, *LEDGERS)
    read, gone = await found_in(cluster)
    everyone = Selection(keys=frozenset({b"e"}))
    erased = [each async for each in erase_range(ports_of(cluster), cluster.topic.topic_id, 0, (0, 10), everyone)]
    assert len(erased) == 1
    (refused,) = await remove(cluster, read, gone)
    assert isinstance(refused, SegmentKept)
    assert refused.reason == "records were erased since the job has read the history: run the job again"
    assert set(await read_all(cluster)) == set(range(10)) - {8}


@pytest.mark.parametrize("change", [{"settled_version": 1}, {"end_offset": 11}])
async def test_another_history_is_left_alone(cluster: Cluster, change: dict[str, int]) -> None:
    """As after the resolution of a fork, or when the history was set back and has grown again."""
    await cold(cluster, *LEDGERS)
    read, gone = await found_in(cluster)
    asdict = {name: getattr(read, name) for name in HistoryRead.__slots__}
    (refused,) = await remove(cluster, HistoryRead(**{**asdict, **change}), gone)
    assert isinstance(refused, SegmentKept)
    assert "set back" in refused.reason


@pytest.mark.parametrize(
    "wrong",
    [[("a", "1"), ("b", "1"), ("c", "1")], [("a", "0"), ("b", "1"), ("c", "9")]],
    ids=["nothing was removed", "a record was altered"],
)
async def test_a_wrong_batch_is_noticed_before_the_commit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, wrong: Rows
) -> None:
    await cold(cluster, [[("a", "1"), ("b", "1"), ("c", "1")]], [[("a", "2")]])
    before, original = cluster.pointer(), SupersededFilter.filter

    def filtered(self: SupersededFilter, batch: Buffer, header: BatchHeader, *, is_last: bool) -> Filtered:
        found = original(self, batch, header, is_last=is_last)
        (other,) = batches_of(0, wrong)
        return Filtered(batch=other, fingerprint=found.fingerprint)

    monkeypatch.setattr(SupersededFilter, "filter", filtered)
    with pytest.raises(Corrupt, match="does not hold exactly the records"):
        await compact(cluster)
    assert cluster.pointer() == before


@pytest.mark.parametrize("call", ["put", "complete_upload", "create_upload", "get", "get_range", "head", "list"])
async def test_a_failure_at_any_step_loses_nothing(cluster: Cluster, background: ThreadBackground, call: str) -> None:
    await cold(cluster, *LEDGERS)
    number = 0
    while True:
        number += 1
        seen, before = 0, values(await read_all(cluster))
        read, gone = await found_in(cluster)

        def fail(name: str, key: str, at: int = number) -> BaseException | None:
            nonlocal seen
            seen += name == call
            return Unavailable("away") if name == call and seen == at else None

        cluster.store.before = fail
        try:
            await remove(cluster, read, gone)
        except (Unavailable, OutcomeUnknown):
            is_over = False
        else:
            is_over = True
        cluster.store.before = lambda name, key: None
        assert set(NEWEST) <= set(await read_all(cluster)) <= set(before)
        if is_over or number > 60:
            break
    assert values(await read_all(cluster)) == NEWEST
    await require_sound(cluster, background)


async def test_nothing_is_committed_that_may_have_been_swept(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cold(cluster, *LEDGERS)
    read, gone = await found_in(cluster)
    before, clock = cluster.pointer(), ShiftedClock()

    async def late(*arguments: Any) -> Any:
        clock.later_s = 7200.0
        return await locked_entry(*arguments)

    monkeypatch.setattr("stratalog_tiering.maintenance.compaction.locked_entry", late)
    removal = remove_superseded(ports_of(cluster, clock), cluster.topic.topic_id, 0, read, offset_set(gone))
    with pytest.raises(LeaseExpired):
        await anext(removal)
    assert cluster.pointer() == before


async def test_a_commit_needs_the_manifest_that_was_read(cluster: Cluster) -> None:
    await cold(cluster, *LEDGERS)
    raced, original = False, cluster.metadata.propose

    async def propose(command: Command, *args: Any, **more: Any) -> Any:
        nonlocal raced
        if not raced and any(
            isinstance(getattr(update, "record", None), type(cluster.pointer())) for update in command.updates
        ):
            raced = True
            await original(Command(updates=(Put(record=cluster.pointer()),)))
        return await original(command, *args, **more)

    cluster.metadata.propose = propose
    await compact(cluster)
    assert raced
    assert values(await read_all(cluster)) == NEWEST


def test_the_newest_of_the_example() -> None:
    batches, base = list[bytes](), 0
    for ledger in LEDGERS:
        batches += batches_of(base, *ledger)
        base = read_header(batches[-1]).next_offset
    assert superseded_offsets(batches) == set(range(10)) - set(NEWEST)
