"""Guarded updates under lost, late and duplicated commands, lost reads and other writers report the actual outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Conflict, Fenced, Invalid, OutcomeUnknown, StaleEpoch, StratalogError, Unavailable
from stratalog_metadata.client import guarded_updates
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import DECISIONS_MAX, SharedGuardedUpdates, decide_again, propose_guarded
from stratalog_metadata.records import DynamicConfig, Versioned
from stratalog_metadata.state.commands import ABSENT, Applied, Command, Delete, Put, Update, VersionIs
from stratalog_metadata.state.guarded_update import GONE, Superseded
from stratalog_metadata.state.machine import apply
from stratalog_metadata.state.record_map import RecordMap

ANSWERED, LOST, UNANSWERED, LATE, TWICE, UNAVAILABLE = "answered", "lost", "unanswered", "late", "twice", "unavailable"
FATES: Final = st.lists(st.sampled_from([ANSWERED, LOST, UNANSWERED, LATE, TWICE, UNAVAILABLE]), max_size=6)
OTHERS: Final = st.lists(st.sampled_from(["", "", "change", "delete", "other requirement"]), max_size=6)
KEY: Final = DynamicConfig(resource="guarded").key()
OTHER_KEY: Final = DynamicConfig(resource="other").key()


NEW_KEY: Final = DynamicConfig(resource="new").key()


def config(value: str, resource: str = "guarded") -> DynamicConfig:
    return DynamicConfig(resource=resource, configs={"value": value})


@dataclass
class Quorum:
    """The state machine behind a network. ``others`` writes something before each proposal and each read."""

    fates: list[str]
    others: list[str]
    reads_fail: bool = False
    records: RecordMap = field(default_factory=RecordMap)
    index: int = 0
    applied: list[int] = field(default_factory=list)
    late: list[Command] = field(default_factory=list)

    def write(self, command: Command) -> Applied | StratalogError:
        self.index += 1
        outcome = apply(self.records, self.index, command)
        self.records.install(outcome.changes)
        return outcome.result

    def take_effect(self, command: Command) -> Applied | StratalogError:
        result = self.write(command)
        if isinstance(result, Applied):
            self.applied.append(result.index)
        return result

    def interfere(self) -> None:
        match self.others.pop(0) if self.others else "":
            case "change":
                self.write(Command(updates=(Put(record=config(f"another's at {self.index}")),)))
            case "delete":
                self.write(Command(updates=(Delete(key=KEY),)))
            case "other requirement":
                self.write(Command(updates=(Put(record=config("changed", "other")),)))

    def deliver_late(self) -> None:
        while self.late:
            self.take_effect(self.late.pop())

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        await asyncio.sleep(0)
        self.interfere()
        fate = self.fates.pop(0) if self.fates else ANSWERED
        if fate == UNAVAILABLE:
            raise Unavailable
        if fate == LATE:
            self.late.append(command)
        if fate in (LOST, LATE):
            raise OutcomeUnknown
        result = self.take_effect(command)
        if fate == TWICE:
            self.take_effect(command)
        if fate == UNANSWERED:
            raise OutcomeUnknown
        if isinstance(result, StratalogError):
            raise result
        return result

    async def read(self, keys: Sequence[str]) -> list[Versioned | None]:
        self.interfere()
        if self.reads_fail:
            raise Unavailable
        return [self.records.get(key) for key in keys]

    async def refresh(self) -> int:
        return self.index


def started(fates: Sequence[str] = (), others: Sequence[str] = (), *, reads_fail: bool = False) -> Quorum:
    quorum = Quorum(list(fates), list(others), reads_fail)
    quorum.write(Command(updates=(Put(record=config("before")), Put(record=config("before", "other")))))
    return quorum


def ours(update: Update | None = None, version: int = 1) -> Command:
    requirements = (VersionIs(key=KEY, version=version), VersionIs(key=OTHER_KEY, version=1))
    return Command(updates=(update or Put(record=config("ours")),), requirements=requirements)


async def propose(quorum: Quorum, command: Command, *, timeout_s: float = 10.0, share: bool = False) -> int | StratalogError:
    metadata = cast(MetadataClient, quorum)
    shared = SharedGuardedUpdates(metadata)
    try:
        if share:
            return await shared.propose(command, KEY, timeout_s)
        return await propose_guarded(metadata, command, KEY, timeout_s)
    except StratalogError as failure:
        return failure
    finally:
        await shared.close()


@pytest.fixture(autouse=True, scope="module")
def no_pauses() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(guarded_updates, "RETRY_S", 0.0)
    patch.setattr(guarded_updates, "DECIDE_AGAIN_S", 0.0)


@given(FATES, OTHERS, st.booleans(), st.booleans(), st.booleans())
def test_the_reported_outcome_is_the_actual_one(
    fates: list[str], others: list[str], deletes: bool, reads_fail: bool, has_no_time: bool
) -> None:
    quorum = started(fates, others, reads_fail=reads_fail)
    command = ours(Delete(key=KEY) if deletes else None)
    reported = asyncio.run(propose(quorum, command, timeout_s=0.0 if has_no_time else 10.0))
    quorum.deliver_late()
    assert len(quorum.applied) <= 1, "it takes effect once at most"
    if isinstance(reported, int):
        assert reported in quorum.applied or (reported == GONE and deletes)
        assert reported != GONE or {LOST, UNANSWERED, LATE}.intersection(fates), "otherwise it is known who deleted it"
    elif isinstance(reported, Superseded):
        assert not (reported.is_certain and quorum.applied)
    elif not isinstance(reported, OutcomeUnknown):
        assert isinstance(reported, Conflict | Unavailable)
        assert not quorum.applied


@given(FATES, OTHERS)
def test_a_shared_update_is_never_reported_as_certainly_lost(fates: list[str], others: list[str]) -> None:
    async def run(quorum: Quorum) -> int | StratalogError:
        updates = SharedGuardedUpdates(cast(MetadataClient, quorum))
        neighbour = Command(updates=(Put(record=config("x", "new")),), requirements=(VersionIs(key=NEW_KEY, version=0),))
        both = (updates.propose(each, key, 10.0) for each, key in ((ours(), KEY), (neighbour, NEW_KEY)))
        reported, _ = await asyncio.gather(*both, return_exceptions=True)
        await updates.close()
        assert isinstance(reported, int | StratalogError)
        return reported

    quorum = started(fates, others)
    reported = asyncio.run(run(quorum))
    quorum.deliver_late()
    assert not isinstance(reported, int) or reported in quorum.applied
    assert not (isinstance(reported, Superseded) and reported.is_certain)


def test_an_update_whose_answer_was_lost_is_recognised() -> None:
    quorum = started([UNANSWERED])
    assert asyncio.run(propose(quorum, ours())) == 2
    assert quorum.applied == [2]


def test_a_lost_answer_and_another_writer_leave_the_outcome_uncertain() -> None:
    """The other writer may have built on the update, so nothing that it refers to may be deleted."""
    quorum = started([UNANSWERED], ["", "change"])
    reported = asyncio.run(propose(quorum, ours()))
    assert isinstance(reported, Superseded)
    assert not reported.is_certain
    assert quorum.applied


def test_without_a_lost_answer_the_outcome_is_certain() -> None:
    quorum = started([UNAVAILABLE], ["change"])
    reported = asyncio.run(propose(quorum, ours()))
    assert isinstance(reported, Superseded)
    assert reported.is_certain
    assert reported.found == quorum.records.get(KEY)


@pytest.mark.parametrize("fate", [UNAVAILABLE, UNANSWERED])
def test_whether_another_writer_has_deleted_the_record_is_known_unless_an_answer_was_lost(fate: str) -> None:
    quorum = started([fate], ["delete"])
    reported = asyncio.run(propose(quorum, ours(Delete(key=KEY))))
    assert not quorum.applied
    if fate == UNANSWERED:
        assert reported == GONE
    else:
        assert isinstance(reported, Superseded)
        assert (reported.found, reported.is_certain) == (None, True)


def test_the_failure_of_another_requirement_is_raised_unchanged() -> None:
    reported = asyncio.run(propose(started([], ["other requirement"]), ours()))
    assert isinstance(reported, Conflict)
    assert reported.detail["key"] == OTHER_KEY


def test_an_outcome_that_stays_unknown_is_reported_as_unknown() -> None:
    assert isinstance(asyncio.run(propose(started([LOST]), ours(), timeout_s=0.0)), OutcomeUnknown)
    assert isinstance(asyncio.run(propose(started([UNAVAILABLE]), ours(), timeout_s=0.0)), Unavailable)
    assert isinstance(asyncio.run(propose(started([], ["change"], reads_fail=True), ours())), OutcomeUnknown)


@pytest.mark.parametrize("failure", [StaleEpoch("late"), Invalid("no")])
def test_refusals_reach_the_caller(failure: StratalogError) -> None:
    class Refusing(Quorum):
        async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
            raise failure

    quorum = Refusing([], [])
    quorum.write(Command(updates=(Put(record=config("before")),)))
    assert asyncio.run(propose(quorum, ours())) is failure
    assert isinstance(failure, Fenced | Invalid)


async def test_a_decision_is_repeated_after_a_conflict() -> None:
    failures = [Conflict("faster"), Superseded(KEY, None, is_certain=True)]

    async def attempt() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert await decide_again("the record", attempt) == "done"


async def test_attempts_on_a_constantly_changing_record_are_bounded() -> None:
    calls = 0

    async def attempt() -> str:
        nonlocal calls
        calls += 1
        raise Conflict("faster")

    with pytest.raises(Conflict, match="changed during each of 8 attempts"):
        await decide_again("the record", attempt)
    assert calls == DECISIONS_MAX


def test_an_update_of_a_record_that_must_not_exist() -> None:
    quorum = started()
    command = Command(updates=(Put(record=config("new", "new")),), requirements=(VersionIs(key=NEW_KEY, version=ABSENT),))
    assert asyncio.run(propose_guarded(cast(MetadataClient, quorum), command, NEW_KEY, 10.0)) == 2
