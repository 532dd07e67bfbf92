"""Commands joined into one: which take effect, what each caller gets, and which must be proposed alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Conflict, OutcomeUnknown, StratalogError, Unavailable
from stratalog_metadata.client import shared_commands
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.shared_commands import TOGETHER_MAX, SharedCommands
from stratalog_metadata.records import LEDGER_IDS, DynamicConfig, Record
from stratalog_metadata.state.commands import ABSENT, Allocate, Applied, Command, Delete, Put, SessionAlive, Update, VersionIs
from stratalog_metadata.state.machine import Outcome, apply
from stratalog_metadata.state.record_map import RecordMap

ANSWERED, LOST, UNANSWERED, UNAVAILABLE = "answered", "lost", "took effect without an answer", "unavailable"


def config(name: str, value: str = "") -> DynamicConfig:
    return DynamicConfig(resource=name, configs={"value": value})


def put(name: str, value: str = "", version: int = ABSENT) -> Command:
    return Command(
        updates=(Put(record=config(name, value)),), requirements=(VersionIs(key=config(name).key(), version=version),)
    )


def key_of(update: Update) -> str:
    return update.record.key() if isinstance(update, Put) else cast(Delete, update).key


@dataclass
class Machine:
    """The state machine, asked as a client asks the quorum; ``fates`` says what becomes of one proposal after the other."""

    records: RecordMap = field(default_factory=RecordMap)
    index: int = 0
    fates: Iterator[str] = field(default_factory=lambda: iter(()))
    proposed: list[Command] = field(default_factory=list)
    changed: list[Record] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event | None = None

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        self.proposed.append(command)
        self.asked.set()
        await (asyncio.sleep(0) if self.go_on is None else self.go_on.wait())
        fate = next(self.fates, ANSWERED)
        if fate == UNAVAILABLE:
            raise Unavailable("no leader")
        if fate == LOST:
            raise OutcomeUnknown()
        outcome = self.apply(command)
        if fate == UNANSWERED:
            raise OutcomeUnknown()
        if isinstance(outcome.result, StratalogError):
            raise outcome.result
        return outcome.result

    def apply(self, command: Command) -> Outcome:
        self.index += 1
        outcome = apply(self.records, self.index, command)
        self.records.install(outcome.changes)
        self.changed += [change.after.record for change in outcome.changes if change.after is not None]
        return outcome

    def content(self) -> dict[str, object]:
        return {each.record.key(): each.record for each in self.records}


def shared(machine: Machine) -> SharedCommands:
    return SharedCommands(cast(MetadataClient, machine))


async def ask_all(machine: Machine, commands: Sequence[Command]) -> list[int | None]:
    """Return the result of each caller that asks in one turn."""
    sharing = shared(machine)
    told = await asyncio.gather(*(sharing.propose(command) for command in commands))
    await sharing.close()
    return list(told)


# -- properties

VERSIONS = {"a": 1, "b": 2, "c": 3, "d": ABSENT, "e": ABSENT}
NAMES = st.sampled_from(list(VERSIONS))
MET = st.builds(lambda name: VersionIs(key=config(name).key(), version=VERSIONS[name]), NAMES)
ANY = MET | MET | st.just(SessionAlive(session_id=9)) | st.just(VersionIs(key=config("a").key(), version=7))
UPDATES = st.builds(lambda name, value: Put(record=config(name, value)), NAMES, st.text("xyz", max_size=2)) | st.builds(
    lambda name: Delete(key=config(name).key()), NAMES
)


def commands(requirements: st.SearchStrategy[VersionIs] | st.SearchStrategy[VersionIs | SessionAlive]) -> Any:
    """Some, of a few records."""
    return st.lists(
        st.builds(
            lambda updates, required: Command(updates=tuple(updates), requirements=tuple(required)),
            st.lists(UPDATES, min_size=1, max_size=3),
            st.lists(requirements, max_size=2),
        ),
        max_size=12,
    )


FATES = st.lists(st.sampled_from([ANSWERED, ANSWERED, LOST, UNANSWERED, UNAVAILABLE]), max_size=8)


def started() -> Machine:
    """Its records are at ``VERSIONS``."""
    machine = Machine()
    for name in "abc":
        machine.apply(put(name))
    return machine


@given(commands(ANY), FATES, st.integers(1, 4))
def test_joined_commands_have_each_key_once_in_order_within_the_bound(
    wanted: list[Command], fates: list[str], bound: int
) -> None:
    machine = started()
    machine.fates = iter(fates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_commands, "TOGETHER_MAX", bound)
        asyncio.run(ask_all(machine, wanted))
    asked = iter(wanted)
    for joined in machine.proposed:
        parts = list(parts_of(joined, asked))
        assert 1 < len(parts) <= bound
        written = [set(map(key_of, part.updates)) for part in parts]
        assert sum(map(len, written)) == len(set().union(*written)), "each key is written by one of them"
        assert set(joined.requirements) == {each for part in parts for each in part.requirements}
        assert len(joined.requirements) == len(set(joined.requirements))


def parts_of(joined: Command, asked: Iterator[Command]) -> Iterator[Command]:
    """The commands that ``joined`` is made of, in the order in which they were asked; those in between go alone."""
    left = joined.updates
    while left:
        part = next(asked)
        if any(each is not mine for each, mine in zip(left, part.updates, strict=False)):
            continue
        yield part
        left = left[len(part.updates) :]


@given(commands(MET))
def test_joined_commands_have_the_effect_of_separate_ones(wanted: list[Command]) -> None:
    machine, alone = started(), started()
    told = asyncio.run(ask_all(machine, wanted))
    for command, version in zip(wanted, told, strict=True):
        if version is not None:
            assert isinstance(alone.apply(command).result, Applied)
    assert machine.content() == alone.content()


@given(commands(ANY), FATES)
def test_each_caller_gets_its_own_result(wanted: list[Command], fates: list[str]) -> None:
    """A version means that the change was made with this version and that no answer was lost."""
    machine = started()
    machine.fates = iter(fates)
    told = asyncio.run(ask_all(machine, wanted))
    assert len(set(told)) <= 2, "one command, and what goes alone"
    assert fates[:1] in ([], [ANSWERED]) or set(told) <= {None}
    for command, version in zip(wanted, told, strict=True):
        for update in command.updates if version is not None else ():
            found = machine.records.get(key_of(update))
            assert found is None or found.version == version
            assert any(update is each for joined in machine.proposed for each in joined.updates)


@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=12), FATES)
def test_a_repeated_proposal_takes_effect_at_most_once(wanted: list[tuple[str, bool]], fates: list[str]) -> None:
    machine = started()
    machine.fates = iter(fates)

    async def ask(sharing: SharedCommands, command: Command) -> None:
        while await sharing.propose(command) is None:
            with contextlib.suppress(OutcomeUnknown, Unavailable):
                await machine.propose(command)
                return

    async def ask_of_all() -> list[BaseException | None]:
        sharing = shared(machine)
        asking = [
            ask(sharing, put(name, str(number), VERSIONS[name] if is_met else 7))
            for number, (name, is_met) in enumerate(wanted)
        ]
        return await asyncio.gather(*asking, return_exceptions=True)

    refused = asyncio.run(ask_of_all())
    values = [record.configs["value"] for record in machine.changed[3:] if isinstance(record, DynamicConfig)]
    assert len(values) == len(set(values))
    for number, outcome in enumerate(refused):
        assert outcome is None or isinstance(outcome, Conflict)
        assert outcome is not None or str(number) in values, "who is told so has taken effect"


# -- examples


async def test_a_thousand_proposals_of_one_turn_are_four_commands() -> None:
    machine = Machine()
    told = await ask_all(machine, [put(f"topic-{number}") for number in range(1000)])
    assert [len(command.updates) for command in machine.proposed] == [TOGETHER_MAX] * 3 + [1000 - 3 * TOGETHER_MAX]
    assert told == [1 + number // TOGETHER_MAX for number in range(1000)]


async def test_a_single_proposal_is_left_to_its_caller() -> None:
    machine = Machine()
    assert await ask_all(machine, [put("a")]) == [None]
    assert not machine.proposed


async def test_the_later_of_two_writers_of_one_key_goes_alone() -> None:
    machine = Machine()
    assert await ask_all(machine, [put("a", "first"), put("b"), put("a", "second"), put("c")]) == [1, 1, None, 1]
    assert machine.content()[config("a").key()] == config("a", "first")


async def test_a_command_that_requires_a_key_that_another_writes_goes_alone() -> None:
    """Of two commands that each require what the other writes, the second would be refused if they were sequential."""
    machine = Machine()
    crossed = [
        Command(updates=(Put(record=config(mine)),), requirements=(VersionIs(key=config(other).key(), version=ABSENT),))
        for mine, other in ("ab", "ba")
    ]
    assert await ask_all(machine, [*crossed, put("c")]) == [1, None, 1]


async def test_allocations_are_not_joined() -> None:
    machine, allocation = Machine(), Command(updates=(Allocate(counter=LEDGER_IDS, count=5),))
    assert await ask_all(machine, [put("a"), allocation, put("b")]) == [1, None, 1]
    assert all(not isinstance(update, Allocate) for command in machine.proposed for update in command.updates)


@pytest.mark.parametrize("fate", [LOST, UNANSWERED, UNAVAILABLE])
async def test_an_unknown_outcome_is_reported_to_no_caller(fate: str) -> None:
    machine = Machine(fates=iter([fate]))
    assert await ask_all(machine, [put("a"), put("b")]) == [None, None]
    assert len(machine.records) == (2 if fate == UNANSWERED else 0)


async def test_a_refused_command_decides_nothing_for_the_others() -> None:
    machine = Machine()
    assert await ask_all(machine, [put("a"), put("b", version=7), put("c")]) == [None, None, None]
    assert not len(machine.records)


async def test_closing_cancels_waiting_callers() -> None:
    machine = Machine(go_on=asyncio.Event())
    sharing = shared(machine)
    under_way = started_asking(sharing.propose(put("a")), sharing.propose(put("b")))
    await machine.asked.wait()
    unsent = started_asking(sharing.propose(put("c")), sharing.propose(put("d")))
    await asyncio.sleep(0)
    await sharing.close()
    told = await asyncio.gather(*under_way, *unsent, return_exceptions=True)
    assert [type(each) for each in told] == [asyncio.CancelledError] * 4
    assert len(machine.proposed) == 1


async def test_a_cancelled_caller_does_not_affect_the_others() -> None:
    go_on = asyncio.Event()
    machine = Machine(go_on=go_on)
    sharing = shared(machine)
    leaves, stays = started_asking(sharing.propose(put("a")), sharing.propose(put("b")))
    await machine.asked.wait()
    leaves.cancel()
    go_on.set()
    assert await stays == 1
    await sharing.close()


async def test_a_caller_cancelled_within_the_turn_does_not_affect_the_others() -> None:
    sharing = shared(Machine())
    first, leaves, stays = started_asking(*(sharing.propose(put(name)) for name in "aab"))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await first == await stays == 1
    await sharing.close()


def started_asking(*asking: Coroutine[Any, Any, int | None]) -> list[asyncio.Task[int | None]]:
    return [asyncio.get_running_loop().create_task(each) for each in asking]
