"""Incremental fetch sessions: the bounds, and the order in which partitions are served."""

from __future__ import annotations

from random import Random

import pytest
from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.fetch_request import FetchWanted
from stratalog_broker.requests.fetch_sessions import EVICTABLE_AFTER_S, FetchSessions, SessionRefused


def wanted(*indexes: int, offset: int = 0) -> list[FetchWanted]:
    return [FetchWanted(b"t", index, offset, 100, -1) for index in indexes]


def test_an_incremental_request_adds_changes_and_forgets() -> None:
    sessions = FetchSessions(10, 1_000, Random(1))
    session = sessions.begin(wanted(0, 1, 2), 0.0)
    assert session is not None
    resumed = sessions.resume(session.session_id, 1, wanted(1, 3, offset=5), [(b"t", 0)], 1.0)
    assert {(one.index, one.offset) for one in resumed} == {(1, 5), (2, 0), (3, 5)}
    resumed.served((b"t", 1))
    assert [one.index for one in sessions.resume(session.session_id, 2, [], [], 2.0)] == [2, 3, 1]


def test_a_wrong_epoch_or_session_is_refused() -> None:
    sessions = FetchSessions(10, 1_000, Random(1))
    session = sessions.begin(wanted(0), 0.0)
    assert session is not None
    with pytest.raises(SessionRefused) as refused:
        sessions.resume(session.session_id, 5, [], [], 0.0)
    assert refused.value.code is ErrorCode.invalid_fetch_session_epoch
    sessions.end(session.session_id)
    with pytest.raises(SessionRefused) as refused:
        sessions.resume(session.session_id, 1, [], [], 0.0)
    assert refused.value.code is ErrorCode.fetch_session_id_not_found


def test_sessions_are_bounded_and_only_idle_ones_give_way() -> None:
    sessions = FetchSessions(2, 1_000, Random(1))
    first = sessions.begin(wanted(0), 0.0)
    second = sessions.begin(wanted(0), 0.0)
    assert first is not None
    assert second is not None
    assert sessions.begin(wanted(0), 1.0) is None, "served in full each time"
    sessions.resume(first.session_id, 1, [], [], EVICTABLE_AFTER_S)
    third = sessions.begin(wanted(0), EVICTABLE_AFTER_S + 1)
    assert third is not None
    assert len(sessions) == 2
    sessions.resume(first.session_id, 2, [], [], EVICTABLE_AFTER_S + 2)


def test_sessions_of_clients_that_are_gone_give_way_when_partitions_are_short() -> None:
    """Sessions that nobody closed kept their partitions until the broker restarted, and no other consumer got a session."""
    sessions = FetchSessions(10, 6, Random(1))
    gone = [sessions.begin(wanted(0, 1), 0.0) for _ in range(2)]
    used = sessions.begin(wanted(0, 1), 1.0)
    assert used is not None
    assert sessions.begin(wanted(0), 1.0) is None
    now_s = EVICTABLE_AFTER_S + 0.5
    assert sessions.begin(wanted(*range(7)), now_s) is None
    assert len(sessions) == 3, "it could not have a session in place of all others"
    sessions.resume(used.session_id, 1, wanted(2, 3), [], now_s)
    assert len(sessions) == 2
    assert sessions.begin(wanted(0, 1), now_s) is not None
    assert len(sessions) == 2
    with pytest.raises(SessionRefused):
        sessions.resume(used.session_id, 2, wanted(4), [], now_s)
    assert all(session is not None for session in gone)


def test_epochs_wrap_to_one() -> None:
    sessions = FetchSessions(2, 1_000, Random(1))
    session = sessions.begin(wanted(0), 0.0)
    assert session is not None
    session.epoch = 2**31 - 1
    sessions.resume(session.session_id, 2**31 - 1, [], [], 0.0)
    sessions.resume(session.session_id, 1, [], [], 0.0)
