"""Plans: offloading continues where the manifest ends, and hot data is deleted only when it is cold and due."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Corrupt, Invalid
from stratalog_metadata.records import (
    NONE_UNDECIDED,
    UNKNOWN_UNDECIDED,
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    TierRequest,
    Topic,
)
from stratalog_metadata.state.commands import SessionAlive, VersionIs
from stratalog_tiering.core.commands import commit_segment, drop_ledgers, fulfil_request, move_start
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger
from stratalog_tiering.core.planning import DropEmpty, DropHot, Fulfil, Idle, Offload, PlanLimits, Step, next_step
from stratalog_tiering.core.policy import SEGMENT_BYTES, SEVEN_DAYS_MS, TierPolicy, tier_policy
from stratalog_tiering.maintenance.fork_resolution import dropped_ledgers
from stratalog_tiering.maintenance.merging import merge_limits

TOPIC = Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=1)
LIMITS = PlanLimits(segment_bytes=100, deletion_lag_ms=50)


def ledger(number: int, base: int, end: int, *, closed: bool = True, size: int = 10, closed_at_ms: int = 1000) -> StoredLedger:
    record = Ledger(
        ledger_id=number, topic_id=TOPIC.topic_id, partition=0, base_offset=base, leader_epoch=0, write_quorum=1, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=("b",)),), state=LedgerState.CLOSED if closed else LedgerState.OPEN,
        last_entry=1, payload_bytes=size, end_offset=end if closed else -1, closed_at_ms=closed_at_ms,
    )  # fmt: skip
    return StoredLedger(version=number, ledger=record)


def state(
    *ledgers: StoredLedger, cold: tuple[int, int] | None = None, request: TierRequest | None = None, start: int = 0
) -> PartitionSnapshot:
    pointer = None
    if cold is not None:
        pointer = ManifestPointer(
            topic_id=TOPIC.topic_id, index=0, manifest_version=1, object_key="k", sha256="", start_offset=cold[0],
            end_offset=cold[1], cold_bytes=1,
        )  # fmt: skip
    refs = tuple(
        LedgerRef(ledger_id=stored.ledger.ledger_id, base_offset=stored.ledger.base_offset, leader_epoch=0)
        for stored in ledgers
    )
    return PartitionSnapshot(
        topic=TOPIC, log=Log(topic_id=TOPIC.topic_id, index=0, ledgers=refs, log_start_offset=start), log_version=1,
        ledgers=ledgers, pointer=pointer, pointer_version=1 if pointer else 0, request=request,
        request_version=1 if request else 0,
    )  # fmt: skip


def plan(current: PartitionSnapshot, now_ms: int = 0, policy: TierPolicy | None = None, cold_since: int = 2000) -> Step:
    since = {stored.ledger.ledger_id: cold_since for stored in current.ledgers}
    return next_step(current, policy or TierPolicy(), LIMITS, since, now_ms)


def ids(step: Step) -> list[int]:
    assert isinstance(step, DropEmpty | Offload | DropHot)
    return [stored.ledger.ledger_id for stored in step.ledgers]


def test_sealed_neighbours_are_offloaded_together_up_to_the_segment_size() -> None:
    step = plan(state(ledger(1, 0, 5, size=40), ledger(2, 5, 9, size=60), ledger(3, 9, 12, size=1)))
    assert isinstance(step, Offload)
    assert ids(step) == [1, 2]


@pytest.mark.parametrize(
    ("undecided", "expected", "following"),
    [
        ((NONE_UNDECIDED, NONE_UNDECIDED, NONE_UNDECIDED), [1, 2, 3], []),
        ((3, NONE_UNDECIDED, NONE_UNDECIDED), [1, 2, 3], []),
        ((3, 3, 10), [1, 2], [3]),
        ((3, 3, 3), [], []),
        ((NONE_UNDECIDED, 7, 7), [1], []),
        ((3, 3, UNKNOWN_UNDECIDED), [1, 2, 3], []),
        ((UNKNOWN_UNDECIDED, 3, 3), [1], [2, 3]),
    ],
)
def test_a_ledger_waits_for_the_transactions_that_are_open_at_its_end(
    undecided: tuple[int, ...], expected: list[int], following: list[int]
) -> None:
    ledgers = [ledger(1, 0, 5), ledger(2, 5, 9), ledger(3, 9, 12)]
    told = [
        replace(stored, ledger=msgspec.structs.replace(stored.ledger, undecided_from=first))
        for stored, first in zip(ledgers, undecided, strict=True)
    ]
    step = plan(state(*told))
    if not expected:
        assert isinstance(step, Idle)
        return
    assert isinstance(step, Offload)
    assert ids(step) == expected
    assert [stored.ledger.ledger_id for stored in step.following] == following


def test_ledgers_that_were_found_undecided_are_not_tried_again() -> None:
    recovered = [
        replace(stored, ledger=msgspec.structs.replace(stored.ledger, undecided_from=UNKNOWN_UNDECIDED))
        for stored in (ledger(1, 0, 5), ledger(2, 5, 9))
    ]
    since = {1: 0, 2: 0}
    assert ids(next_step(state(*recovered), TierPolicy(), LIMITS, since, 0)) == [1, 2]
    assert ids(next_step(state(*recovered), TierPolicy(), LIMITS, since, 0, open_since=5)) == [1]
    assert isinstance(next_step(state(*recovered), TierPolicy(), LIMITS, since, 0, open_since=4), Idle)


@pytest.mark.parametrize(("retention_hours", "expected"), [(-1, [1, 2, 3]), (24, [1, 2, 3]), (23, [1, 2]), (1, [1])])
def test_neighbours_that_were_closed_far_apart_expire_apart(retention_hours: int, expected: list[int]) -> None:
    """Each ledger was open for at most an hour, so three closed an hour apart span three hours: an eighth of a day."""
    hour_ms = 3_600_000
    ledgers = [ledger(number, number, number + 1, closed_at_ms=number * hour_ms) for number in (1, 2, 3)]
    policy = TierPolicy(retention_ms=retention_hours * hour_ms if retention_hours > 0 else -1, segment_ms=hour_ms)
    assert ids(plan(state(*ledgers, cold=(0, 1)), policy=policy)) == expected


def test_neighbours_are_no_larger_than_an_eighth_of_what_may_remain() -> None:
    ledgers = [ledger(number, number, number + 1, size=10) for number in (1, 2, 3)]
    assert ids(plan(state(*ledgers, cold=(0, 1)), policy=TierPolicy(retention_ms=-1, retention_bytes=160))) == [1, 2]


@pytest.mark.parametrize(("configs", "expected"), [({}, [1]), ({SEGMENT_BYTES: "120"}, [1, 2]), ({SEGMENT_BYTES: "59"}, [1])])
def test_a_topic_may_have_segments_of_another_size_than_the_workers(configs: dict[str, str], expected: list[int]) -> None:
    ledgers = [ledger(number, number, number + 1, size=60) for number in (1, 2, 3)]
    policy = tier_policy({"retention.ms": "-1", **configs})
    assert ids(plan(state(*ledgers, cold=(0, 1)), policy=policy)) == expected
    assert merge_limits(policy, LIMITS.segment_bytes).segment_bytes == int(configs.get(SEGMENT_BYTES, 100))


def test_a_ledger_larger_than_a_segment_is_offloaded_alone() -> None:
    assert ids(plan(state(ledger(1, 0, 5, size=500), ledger(2, 5, 9)))) == [1]


def test_an_open_ledger_ends_the_run() -> None:
    assert ids(plan(state(ledger(1, 0, 5), ledger(2, 5, -1, closed=False)))) == [1]
    assert plan(state(ledger(2, 5, -1, closed=False))) == Idle()


GUARDS = (SessionAlive(session_id=7), VersionIs(key="lease/x", version=3))


def test_every_command_requires_session_lease_and_its_planned_inputs() -> None:
    """A worker that continues after it lost its lease, or is late, changes nothing (pulsar#17736)."""
    ledgers = (ledger(1, 0, 5), ledger(2, 5, 9))
    request = TierRequest(topic_id=TOPIC.topic_id, index=0, end_offset=9)
    current = state(*ledgers, cold=(0, 9), request=request)
    assert current.pointer is not None
    successor = msgspec.structs.replace(current.pointer, manifest_version=current.pointer.manifest_version + 1)
    pointer = VersionIs(key=current.pointer.key(), version=1)
    log = VersionIs(key=current.log.key(), version=1)
    records = {VersionIs(key=stored.ledger.key(), version=stored.version) for stored in ledgers}
    for command, needed in (
        (commit_segment(current, successor, ledgers, GUARDS), {pointer, *records}),
        (drop_ledgers(current, ledgers, GUARDS), {pointer, log, *records}),
        (move_start(current, successor, GUARDS), {pointer, log}),
        (fulfil_request(current, GUARDS), {VersionIs(key=request.key(), version=1)}),
    ):
        assert set(command.requirements) == {*GUARDS, *needed}


def test_no_command_drops_the_only_copy_of_a_record() -> None:
    hot, cold_one, empty = ledger(1, 5, 9), ledger(2, 0, 5), ledger(3, 9, 9)
    current = state(cold_one, hot, empty, cold=(0, 5))
    drop_ledgers(current, [cold_one, empty], GUARDS)
    drop_ledgers(current, [hot], GUARDS, log_start_offset=9)
    for held, start in ((hot, None), (hot, 8), (ledger(4, 9, -1, closed=False), 100)):
        with pytest.raises(AssertionError):
            drop_ledgers(current, [held], GUARDS, start)


@pytest.mark.parametrize("change", [{"manifest_version": 1}, {"start_offset": 0}, {"end_offset": 8}])
def test_no_command_shortens_history(change: dict[str, int]) -> None:
    current = state(ledger(1, 0, 9), cold=(3, 9))
    assert current.pointer is not None
    successor = msgspec.structs.replace(current.pointer, manifest_version=2)
    move_start(current, successor, GUARDS)
    with pytest.raises(AssertionError):
        move_start(current, msgspec.structs.replace(successor, **change), GUARDS)


def test_offloading_continues_where_the_manifest_ends() -> None:
    step = plan(state(ledger(1, 0, 5), ledger(2, 5, 9), cold=(0, 5)))
    assert isinstance(step, Offload)
    assert ids(step) == [2]


@pytest.mark.parametrize("base", [4, 6])
def test_a_gap_or_overlap_stops_everything(base: int) -> None:
    with pytest.raises(Corrupt, match="do not meet"):
        plan(state(ledger(2, base, 9), cold=(0, 5)))


def test_empty_ledgers_are_dropped_if_their_offset_is_kept() -> None:
    assert ids(plan(state(ledger(1, 5, 5), ledger(2, 5, 9)))) == [1]
    assert ids(plan(state(ledger(1, 0, 0)))) == [1]
    assert ids(plan(state(ledger(1, 5, 5), cold=(0, 5)))) == [1]
    assert plan(state(ledger(1, 5, 5))) == Idle()


def test_an_empty_ledger_stays_while_it_may_hold_newer_state_than_the_cold_history() -> None:
    """Retention has removed hot records after the manifest's end: only the ledger's checkpoint tells who wrote them."""
    empty = ledger(1, 9, 9)
    assert plan(state(empty, cold=(0, 5), start=9)) == Idle()
    assert plan(state(empty, ledger(2, 9, 9), cold=(0, 5), start=9)) == Idle(), "the checkpoint of either may be incomplete"
    opened = ledger(3, 9, -1, closed=False)
    assert plan(state(empty, opened, cold=(0, 5), start=9)) == Idle(), "the open one may have no records yet"
    assert ids(plan(state(empty, ledger(2, 9, 9), ledger(3, 9, 12), cold=(0, 5), start=9))) == [1, 2]


def test_only_ledgers_with_records_decide_transactions() -> None:
    """The owner of the last ledger has died before its checkpoint was complete, perhaps before its first entry."""
    undecided = ledger(1, 0, 5)
    undecided = replace(undecided, ledger=msgspec.structs.replace(undecided.ledger, undecided_from=UNKNOWN_UNDECIDED))
    step = plan(state(undecided, ledger(2, 5, 5)))
    assert isinstance(step, Offload)
    assert (ids(step), step.following) == ([1], ())


def test_hot_copies_are_dropped_after_the_lag_and_the_local_retention() -> None:
    cold = state(ledger(1, 0, 5), ledger(2, 5, -1, closed=False), cold=(0, 5))
    assert plan(cold, now_ms=2049) == Idle(until_ms=2050)
    assert isinstance(plan(cold, now_ms=2050), DropHot)
    longer = tier_policy({"local.retention.ms": "5000"})
    assert plan(cold, now_ms=2050, policy=longer) == Idle(until_ms=6000)
    assert plan(cold, now_ms=10**12, policy=tier_policy({"local.retention.ms": "-1"})) == Idle()
    assert plan(cold, now_ms=1999, policy=tier_policy({"local.retention.ms": "0"})) == Idle(until_ms=2000)
    assert isinstance(plan(cold, now_ms=2000, policy=tier_policy({"local.retention.ms": "0"})), DropHot), "without a lag"


def test_hot_copies_on_a_bookie_that_is_low_on_space_are_dropped_once_they_are_cold() -> None:
    kept = tier_policy({"local.retention.ms": "-1"})
    low = replace(LIMITS, bookies_low_on_space=frozenset({"b"}))
    cold = state(ledger(1, 0, 5), ledger(2, 5, 9), ledger(3, 9, -1, closed=False), cold=(0, 9))
    since = {1: 2000, 2: 2000}
    assert next_step(cold, kept, LIMITS, since, 2001) == Idle()
    assert ids(next_step(cold, kept, low, since, 2001)) == [1, 2]
    elsewhere = replace(LIMITS, bookies_low_on_space=frozenset({"c"}))
    assert next_step(cold, kept, elsewhere, since, 2001) == Idle()
    half = state(ledger(1, 0, 5), ledger(2, 5, 9), ledger(3, 9, -1, closed=False), cold=(0, 5))
    paused = replace(kept, is_copied=False)
    assert ids(next_step(half, paused, low, {1: 2000}, 2001)) == [1], "what is hot only stays"


@pytest.mark.parametrize(
    ("configs", "until_ms"),
    [
        ({"local.retention.ms": "-2"}, 1000 + SEVEN_DAYS_MS),
        ({"local.retention.ms": "-2", "retention.ms": "9000"}, 10_000),
        ({"local.retention.ms": "-2", "retention.ms": "-1"}, None),
        ({"local.retention.bytes": "-2", "retention.ms": "9000"}, 10_000),
        ({"local.retention.bytes": "-1", "retention.ms": "-1"}, None),
        ({}, 2050),
    ],
)
def test_minus_two_is_the_topics_own_retention(configs: dict[str, str], until_ms: int | None) -> None:
    cold = state(ledger(1, 0, 5), cold=(0, 5))
    assert plan(cold, policy=tier_policy(configs)) == Idle(until_ms=until_ms)


@pytest.mark.parametrize(
    ("configs", "dropped"),
    [
        ({"local.retention.bytes": "0"}, [1, 2]),
        ({"local.retention.bytes": "15"}, [1]),
        ({"local.retention.bytes": "20"}, [1]),
        ({"local.retention.bytes": "21"}, []),
        ({"local.retention.bytes": "-2", "retention.bytes": "20"}, [1]),
        ({"local.retention.bytes": "-1", "retention.bytes": "20"}, []),
        ({"local.retention.ms": "-1", "local.retention.bytes": "20"}, [1]),
    ],
)
def test_hot_copies_are_dropped_oldest_first_while_newer_ones_hold_the_local_retention(
    configs: dict[str, str], dropped: list[int]
) -> None:
    """Of three ledgers of ten bytes the last one is not cold and stays."""
    current = state(ledger(1, 0, 5), ledger(2, 5, 9), ledger(3, 9, 12), cold=(0, 9))
    step = plan(current, now_ms=2000, policy=tier_policy({"remote.log.copy.disable": "true", **configs}))
    assert (ids(step) if isinstance(step, DropHot) else []) == dropped


@pytest.mark.parametrize("configs", [{"remote.log.copy.disable": "true"}, {"remote.storage.enable": "False"}])
def test_nothing_is_copied_while_copying_is_disabled_and_afterwards_it_goes_on_at_the_manifests_end(
    configs: dict[str, str],
) -> None:
    current = state(ledger(1, 0, 5), ledger(2, 5, 9), ledger(3, 9, 12), cold=(0, 5))
    assert plan(current, policy=tier_policy(configs)) == Idle(until_ms=2050)
    assert ids(plan(current, now_ms=2050, policy=tier_policy(configs))) == [1], "a verified copy is dropped as always"
    resumed = plan(current, now_ms=10**9)
    assert isinstance(resumed, Offload)
    assert ids(resumed) == [2, 3]


def test_hot_copies_below_the_log_start_are_dropped_at_once() -> None:
    assert isinstance(plan(state(ledger(1, 0, 5), cold=(5, 5), start=5)), DropHot)


def test_a_request_to_delete_hot_copies_does_not_wait() -> None:
    request = TierRequest(topic_id=TOPIC.topic_id, index=0, end_offset=5, delete_hot=True)
    assert ids(plan(state(ledger(1, 0, 5), ledger(2, 5, 9), cold=(0, 9), request=request))) == [1]


def test_a_request_is_done_when_its_records_are_cold_and_dropped_if_requested() -> None:
    keep = TierRequest(topic_id=TOPIC.topic_id, index=0, end_offset=5)
    assert plan(state(ledger(1, 0, 5), cold=(0, 5), request=keep)) == Fulfil()
    assert plan(state(cold=(0, 5), request=TierRequest(topic_id=TOPIC.topic_id, index=0, end_offset=6))) == Idle()
    assert plan(state(cold=(0, 5), request=TierRequest(topic_id=TOPIC.topic_id, index=0))) == Idle()


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=8),
    st.integers(0, 8),
    st.booleans(),
    st.integers(0, 3000),
    st.fixed_dictionaries(
        {},
        optional={
            "remote.log.copy.disable": st.sampled_from(["true", "false"]),
            "local.retention.ms": st.sampled_from(["-2", "-1", "0", "1500"]),
            "local.retention.bytes": st.sampled_from(["-2", "-1", "0", "60"]),
        },
    ),
)
def test_steps_never_break_the_history(
    shape: list[tuple[int, int]], cold_ledgers: int, last_open: bool, now_ms: int, configs: dict[str, str]
) -> None:
    ledgers, base = [], 0
    for number, (records, size) in enumerate(shape):
        closed = not (last_open and number == len(shape) - 1)
        ledgers.append(ledger(number, base, base + records, closed=closed, size=size))
        base += records
    closed_ends = [stored.ledger.end_offset for stored in ledgers if stored.ledger.state is LedgerState.CLOSED]
    cold_end = closed_ends[min(cold_ledgers, len(closed_ends)) - 1] if closed_ends and cold_ledgers else None
    current = state(*ledgers, cold=None if cold_end is None else (0, cold_end))
    step = plan(current, now_ms, tier_policy(configs))
    if isinstance(step, Offload):
        assert configs.get("remote.log.copy.disable") != "true"
        bases = [stored.ledger.base_offset for stored in step.ledgers]
        ends = [stored.ledger.end_offset for stored in step.ledgers]
        assert bases == [current.cold_end, *ends[:-1]]
        assert all(stored.ledger.state is LedgerState.CLOSED for stored in step.ledgers)
    if isinstance(step, DropHot):
        assert all(stored.ledger.end_offset <= current.cold_end for stored in step.ledgers)
    if isinstance(step, DropEmpty):
        assert all(stored.ledger.base_offset == stored.ledger.end_offset for stored in step.ledgers)


@pytest.mark.parametrize(
    ("ledgers", "contained", "dropped"),
    [
        ([(1, 0, 5), (2, 5, 9)], {1, 2}, []),  # the line was made of them, and the log goes on where it ends
        ([(1, 0, 5)], {1, 2}, [1]),  # the log would go on below the line's end
        ([(1, 0, 5), (3, 5, 9)], {1, 2}, None),  # other records that happen to end where the line ends
        ([(1, 0, 5), (3, 5, 12)], {1, 2}, None),
        ([(3, 9, 12)], {1, 2}, []),
        ([(3, 10, 12)], {1, 2}, None),  # what lies between is in neither
        ([(1, 5, 5), (3, 9, 12)], {2}, [1]),  # no records
    ],
)
def test_ledgers_that_continue_a_kept_line_stay(
    ledgers: list[tuple[int, int, int]], contained: set[int], dropped: list[int] | None
) -> None:
    """The line ends at offset 9."""
    current = state(*(ledger(*each) for each in ledgers))
    if dropped is None:
        with pytest.raises(Invalid, match="--discard-hot"):
            dropped_ledgers(current, 9, contained, 0, discard_hot=False)
        gone = dropped_ledgers(current, 9, contained, 0, discard_hot=True)
        assert ids(DropEmpty(ledgers=gone)) == [number for number, _, _ in ledgers]
    else:
        assert ids(DropEmpty(ledgers=dropped_ledgers(current, 9, contained, 0, discard_hot=False))) == dropped


def test_an_open_ledger_that_does_not_continue_a_kept_line_is_discarded_if_its_owner_is_gone() -> None:
    """Bookies may have deleted it since metadata was copied, so nobody could seal it first."""
    opened = state(ledger(3, 5, -1, closed=False))
    with pytest.raises(Invalid, match="one is open"):
        dropped_ledgers(opened, 9, {1}, 0, discard_hot=True)
    with pytest.raises(Invalid, match="--discard-hot"):
        dropped_ledgers(opened, 9, {1}, 1, discard_hot=False)
    assert ids(DropEmpty(ledgers=dropped_ledgers(opened, 9, {1}, 1, discard_hot=True))) == [3]
