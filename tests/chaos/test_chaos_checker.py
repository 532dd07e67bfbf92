"""The checker finds each anomaly planted into a handmade history, and none in a history of a correct log."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.checker import Verdict, check, offending
from chaos.history import CORRUPT, Operation, Pair


class History:
    """Operations one after another; each call is invoked and completed at once, unless stated otherwise."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(self, process: int, type: Any, f: Any, **fields: Any) -> None:
        index = len(self.operations)
        self.operations.append(Operation(index=index, time_ns=index, process=process, type=type, f=f, **fields))

    def begin(self, value: int, *, key: int = 0, client: str = "a", idempotent: bool = True) -> None:
        self.add(value, "invoke", "send", key=key, value=value, client=client, idempotent=idempotent)

    def end(self, value: int, outcome: str, offset: int | None = None, *, key: int = 0) -> None:
        self.add(value, outcome, "send", key=key, value=value, offset=offset)

    def send(self, value: int, offset: int | None, outcome: str = "ok", **fields: Any) -> None:
        self.begin(value, **fields)
        self.end(value, outcome, offset, key=fields.get("key", 0))

    def poll(self, *pairs: Pair, key: int = 0, process: int = 1000, group: str = "") -> None:
        self.add(process, "invoke", "poll", group=group)
        self.add(process, "ok", "poll", polled={key: pairs}, group=group)

    def assign(self, *keys: int, process: int = 1000) -> None:
        self.add(process, "ok", "assign", keys=keys)

    def rebalance(self, *keys: int, process: int, group: str = "g") -> None:
        self.add(process, "ok", "rebalance", keys=keys, group=group)

    def commit(self, offset: int, *, process: int, outcome: str = "ok", group: str = "g") -> None:
        self.add(process, outcome, "commit", committed={0: offset}, group=group)

    def three_sent(self, *, idempotent: bool = True) -> None:
        for number in range(3):
            self.send(100 + number, number, idempotent=idempotent)

    def verdict(self) -> Verdict:
        return check(self.operations)


@pytest.fixture
def history() -> History:
    return History()


def test_what_was_sent_and_read_in_order_is_clean(history: History) -> None:
    history.three_sent()
    history.poll((0, 100), (1, 101))
    history.poll((2, 102))
    assert history.verdict().is_clean


def test_an_acknowledged_record_that_readers_pass_by_is_lost(history: History) -> None:
    history.three_sent()
    history.poll((0, 100))
    history.assign(0)
    history.poll((2, 102))
    assert history.verdict().counts == {"lost": 1}
    (anomaly,) = history.verdict().examples
    assert "value 101" in anomaly.detail
    assert [found.value for found in offending(history.verdict(), history.operations)] == [101, 101]


def test_an_acknowledged_record_beyond_all_reads_is_unseen(history: History) -> None:
    history.three_sent()
    history.poll((0, 100), (1, 101))
    assert history.verdict().counts == {"unseen": 1}


def test_another_value_at_an_acknowledged_offset_is_inconsistent(history: History) -> None:
    history.three_sent()
    history.begin(200)
    history.poll((0, 100), (1, 200), (2, 102))
    assert history.verdict().counts == {"inconsistent": 1}


def test_two_readers_that_see_different_values_at_one_offset(history: History) -> None:
    history.begin(1)
    history.begin(2)
    history.poll((0, 1), process=1000)
    history.poll((0, 2), process=1001)
    assert history.verdict().counts == {"inconsistent": 1}


def test_duplicates_count_for_idempotent_producers_only(history: History) -> None:
    history.send(1, 0, idempotent=True)
    history.send(2, 2, idempotent=False)
    history.poll((0, 1), (1, 2), (2, 2), (3, 1))
    assert history.verdict().counts == {"duplicate": 1}
    assert history.verdict().notes == {"duplicates of producers without idempotence": 1}


TIMED_OUT = "1 message(s) timed out on topic [0]"


@pytest.mark.parametrize(
    ("client", "reason", "anomalies"),
    [
        ("a", TIMED_OUT, {}),
        ("b", TIMED_OUT, {"duplicate": 1}),
        ("a", "skipped sequence numbers", {}),
        ("a", "sequence desynchronization", {"duplicate": 1}),
    ],
)
def test_a_producer_that_began_a_new_epoch_by_itself_may_repeat_itself(
    history: History, client: str, reason: str, anomalies: dict[str, int]
) -> None:
    history.begin(2, client=client)
    history.add(900, "info", "epoch", client="a", error=reason)
    history.end(2, "ok", 5)
    history.poll((1, 2), (5, 2))
    verdict = history.verdict()
    assert verdict.counts == anomalies
    assert [("desynchronization" in found.detail) for found in verdict.examples] == [client == "a"] * len(anomalies)


def test_an_epoch_before_or_after_excuses_nothing(history: History) -> None:
    history.add(900, "info", "epoch", client="a", error=TIMED_OUT)
    history.send(2, 5)
    history.add(900, "info", "epoch", client="a", error=TIMED_OUT)
    history.poll((1, 2), (5, 2))
    assert history.verdict().counts == {"duplicate": 1}


def test_a_duplicate_is_told_once_however_often_it_is_read(history: History) -> None:
    history.send(1, 0)
    for process in range(1000, 1005):
        history.poll((0, 1), (1, 1), process=process)
    assert history.verdict().counts == {"duplicate": 1}


def test_sends_of_an_idempotent_producer_keep_their_order(history: History) -> None:
    history.begin(1)
    history.begin(2)
    history.end(1, "ok", 1)
    history.end(2, "ok", 0)
    history.poll((0, 2), (1, 1))
    assert history.verdict().counts == {"reordered": 1}


def test_sends_of_others_may_change_their_order(history: History) -> None:
    history.begin(1, idempotent=False)
    history.begin(2, idempotent=False)
    history.end(1, "ok", 1)
    history.end(2, "ok", 0)
    history.poll((0, 2), (1, 1))
    assert history.verdict().is_clean


def test_a_send_lands_behind_all_that_was_acknowledged_before_it(history: History) -> None:
    history.send(1, 5, client="a")
    history.send(2, 4, client="b")
    history.poll((4, 2), (5, 1))
    assert history.verdict().counts == {"nonmonotonic-send": 1}


def test_sends_at_the_same_time_may_land_in_any_order(history: History) -> None:
    history.begin(2, client="b")
    history.send(1, 5, client="a")
    history.end(2, "ok", 4)
    history.poll((4, 2), (5, 1))
    assert history.verdict().is_clean


def test_a_record_left_out_between_polls_is_a_skip(history: History) -> None:
    history.three_sent()
    history.poll((1, 101), process=1001)
    history.poll((0, 100))
    history.poll((2, 102))
    assert history.verdict().counts == {"poll-skip": 1}


def test_a_record_left_out_within_a_poll_is_a_skip(history: History) -> None:
    history.three_sent()
    history.poll((1, 101), process=1001)
    history.poll((0, 100), (2, 102))
    assert history.verdict().counts == {"int-poll-skip": 1}


def test_offsets_at_which_nothing_is_known_may_be_left_out(history: History) -> None:
    history.send(1, 0)
    history.send(2, 7)
    history.poll((0, 1), (7, 2))
    assert history.verdict().is_clean


def test_polls_go_forward_only(history: History) -> None:
    history.three_sent()
    history.poll((0, 100), (1, 101), (2, 102))
    history.poll((1, 101), (0, 100))
    assert history.verdict().counts == {"nonmonotonic-poll": 1, "int-nonmonotonic-poll": 1}


def test_an_assignment_begins_anew(history: History) -> None:
    history.three_sent()
    history.poll((0, 100), (1, 101), (2, 102))
    history.assign(0)
    history.poll((0, 100))
    assert history.verdict().is_clean


@pytest.mark.parametrize(("outcome", "anomalies"), [("fail", {"aborted-read": 1}), ("info", {})])
def test_only_the_value_of_a_failed_send_must_not_be_read(history: History, outcome: str, anomalies: dict[str, int]) -> None:
    history.send(1, None, outcome)
    history.poll((0, 1))
    assert history.verdict().counts == anomalies


def test_a_failed_or_unknown_send_need_not_be_found(history: History) -> None:
    history.send(1, None, "fail")
    history.send(2, None, "info")
    history.begin(3)
    assert history.verdict().is_clean


def test_what_nobody_sent_is_a_phantom(history: History) -> None:
    history.send(1, 0, key=1)
    history.poll((0, 1), key=1)
    history.poll((0, 1), key=0)
    assert history.verdict().counts == {"phantom": 1}


def test_other_bytes_than_were_sent_are_corrupt_and_their_record_is_not_lost_too(history: History) -> None:
    history.send(1, 0)
    history.poll((0, CORRUPT))
    assert history.verdict().counts == {"corrupt": 1}


def test_a_group_reads_everything_among_its_members(history: History) -> None:
    history.three_sent()
    history.poll((0, 100), (1, 101), (2, 102))
    history.rebalance(0, process=1)
    history.poll((0, 100), process=1, group="g")
    history.rebalance(0, process=2)
    history.poll((2, 102), process=2, group="g")
    assert history.verdict().counts == {"group-skip": 1}


def test_a_member_begins_at_what_was_committed_or_repeats_what_was_not(history: History) -> None:
    history.three_sent()
    history.rebalance(0, process=1)
    history.poll((0, 100), (1, 101), process=1, group="g")
    history.commit(1, process=1)
    history.commit(2, process=1, outcome="info")
    history.rebalance(0, process=2)
    history.poll((1, 101), (2, 102), process=2, group="g")
    assert history.verdict().is_clean


def test_a_commit_that_is_forgotten(history: History) -> None:
    history.three_sent()
    history.rebalance(0, process=1)
    history.poll((0, 100), (1, 101), (2, 102), process=1, group="g")
    history.commit(3, process=1)
    history.rebalance(0, process=2)
    history.poll((1, 101), process=2, group="g")
    assert history.verdict().counts == {"lost-commit": 1}


@pytest.mark.parametrize(("second_begins", "anomalies"), [("before the first ends", {}), ("after it", {"lost-commit": 1})])
def test_commits_under_way_together_come_in_any_order(history: History, second_begins: str, anomalies: dict[str, int]) -> None:
    history.three_sent()
    history.rebalance(0, process=1)
    history.poll((0, 100), (1, 101), (2, 102), process=1, group="g")
    history.commit(1, process=1, outcome="invoke")
    if second_begins == "after it":
        history.commit(1, process=1)
    history.commit(3, process=1, outcome="invoke")
    history.commit(3, process=1)
    if second_begins != "after it":
        history.commit(1, process=1)
    history.rebalance(0, process=2)
    history.poll((1, 101), (2, 102), process=2, group="g")
    assert history.verdict().counts == anomalies


def test_what_was_committed_after_the_assignment_binds_the_next_one_only(history: History) -> None:
    history.three_sent()
    history.rebalance(0, process=1)
    history.poll((0, 100), (1, 101), (2, 102), process=1, group="g")
    history.rebalance(0, process=2)
    history.commit(2, process=1)
    history.poll((0, 100), (1, 101), (2, 102), process=2, group="g")
    assert history.verdict().is_clean


# -- properties: a correct log under random clients


@st.composite
def correct_histories(draw: st.DrawFn) -> History:
    """One log that appends unknown and known sends in order, readers that follow it, and a final read of all records."""
    history, log = History(), list[int]()
    positions = {1000: 0, 1001: 0}
    for value in range(draw(st.integers(3, 25))):
        outcome = draw(st.sampled_from(["ok", "ok", "ok", "info", "lost info", "fail"]))
        history.begin(value, client=draw(st.sampled_from("ab")))
        if outcome in ("ok", "info"):
            log.append(value)
        history.end(value, "info" if "info" in outcome else outcome, len(log) - 1 if outcome == "ok" else None)
        for process in draw(st.sets(st.sampled_from(sorted(positions)))):
            end = draw(st.integers(positions[process], len(log)))
            history.poll(*enumerate(log[positions[process] : end], positions[process]), process=process)
            positions[process] = end
    history.poll(*enumerate(log), process=1002)
    return history


@settings(max_examples=40)
@given(correct_histories())
def test_a_correct_log_is_clean(history: History) -> None:
    assert history.verdict().is_clean


@settings(max_examples=40)
@given(correct_histories(), st.data())
def test_a_record_missing_from_all_reads_is_found(history: History, data: st.DataObject) -> None:
    acknowledged = [found for found in history.operations if found.f == "send" and found.type == "ok"]
    if not acknowledged:
        return
    gone = data.draw(st.sampled_from(acknowledged))
    for index, found in enumerate(history.operations):
        if found.polled:
            left = [pair for pair in found.polled[0] if pair[0] != gone.offset]
            history.operations[index] = _with_pairs(found, left)
    assert {"lost", "unseen"} & history.verdict().counts.keys()


@settings(max_examples=40)
@given(correct_histories(), st.data())
def test_a_changed_value_is_found(history: History, data: st.DataObject) -> None:
    final = history.operations[-1]
    assert final.polled is not None
    pairs = list(final.polled[0])
    if not pairs:
        return
    changed = data.draw(st.integers(0, len(pairs) - 1))
    pairs[changed] = (pairs[changed][0], 10_000)
    history.operations[-1] = _with_pairs(final, pairs)
    assert {"inconsistent", "phantom"} & history.verdict().counts.keys()


def _with_pairs(operation: Operation, pairs: list[Pair]) -> Operation:
    return Operation(
        index=operation.index, time_ns=operation.time_ns, process=operation.process, type="ok", f="poll", polled={0: pairs}
    )
