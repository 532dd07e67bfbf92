"""Log and store opened together, also after a stop between two steps; and proposals whose outcome is decided late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from stratalog_core.errors import Corrupt
from stratalog_core.system import SystemFiles
from stratalog_metadata.node.pending_proposals import PendingProposals
from stratalog_metadata.protocol.messages import CommandAnswer
from stratalog_metadata.raft import Entry, EntryKind, HardState, Ready, Snapshot
from stratalog_metadata.records import DynamicConfig, Versioned
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.commands import Applied, Command, Put
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage.node_storage import INSTALLING_FILE, NodeStorage
from stratalog_metadata.storage.raft_log import DurableLog, LogWrite
from stratalog_metadata.storage.state_store import EMPTY, SqliteStore

IMAGE = StateImage(index=40, term=3, records=[Versioned(39, DynamicConfig(resource="a"))])


def entry(index: int, term: int = 1) -> Entry:
    return Entry(index, term, EntryKind.NO_OP)


def opened(root: Path) -> NodeStorage:
    return NodeStorage(SystemFiles(root), SqliteStore(root / "state.sqlite"), 1 << 20)


def write_log(root: Path, *writes: LogWrite) -> None:
    log, _, _ = DurableLog.open(SystemFiles(root), "raft")
    log.persist([LogWrite(hard_state=HardState(term=5)), *writes])
    log.close()


def write_state(root: Path, image: StateImage) -> None:
    store = SqliteStore(root / "state.sqlite")
    store.replace(image)
    store.close()


def test_a_snapshot_is_installed_with_the_entries_after_it(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    readies = [
        Ready(number=1, hard_state=HardState(term=5), entries=(entry(1),)),
        Ready(number=2, snapshot=Snapshot(index=40, term=3, content=snapshot.encode(IMAGE))),
        Ready(number=3, entries=(entry(41, 4),), previous_term=3),
    ]
    assert storage.persist(readies) == IMAGE
    storage.close()
    storage = opened(tmp_path)
    assert storage.recovered.image == IMAGE
    assert (storage.recovered.tail.base_index, storage.recovered.tail.last_index) == (40, 41)
    storage.close()


def test_a_snapshot_stored_without_its_log_starts_a_new_log(tmp_path: Path) -> None:
    """The node stopped between storing the snapshot and starting the log after it."""
    write_log(tmp_path, LogWrite(entries=(entry(1), entry(2))))
    write_state(tmp_path, IMAGE)
    (tmp_path / INSTALLING_FILE).write_text("[40, 3]")
    for _ in range(2):
        storage = opened(tmp_path)
        tail = storage.recovered.tail
        assert (tail.base_index, tail.base_term, tail.last_index) == (40, 3, 40)
        storage.close()


def test_a_log_without_the_entries_of_the_state_is_refused(tmp_path: Path) -> None:
    """The log's end was lost. It must not be mistaken for an interrupted installation of a snapshot."""
    write_log(tmp_path, LogWrite(entries=(entry(1), entry(2))))
    write_state(tmp_path, IMAGE)
    for marker in ("", "[39, 3]"):
        if marker:
            (tmp_path / INSTALLING_FILE).write_text(marker)
        with pytest.raises(Corrupt, match="entry 40 of term 3, which was durable"):
            opened(tmp_path)


def test_an_installation_that_had_not_started_is_dropped(tmp_path: Path) -> None:
    write_log(tmp_path, LogWrite(entries=(entry(1), entry(2))))
    (tmp_path / INSTALLING_FILE).write_text("[40, 3]")
    storage = opened(tmp_path)
    assert storage.recovered.tail.last_index == 2
    assert not (tmp_path / INSTALLING_FILE).exists()
    storage.close()


def test_a_gap_between_state_and_log_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path, LogWrite(reset_to=(50, 3)))
    write_state(tmp_path, IMAGE)
    with pytest.raises(Corrupt, match="the state ends at 40, but the raft log begins after 50"):
        opened(tmp_path)


def test_a_state_without_log_and_vote_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path, IMAGE)
    with pytest.raises(Corrupt, match="vote twice"):
        opened(tmp_path)


def test_a_committed_command_of_an_unknown_kind_is_not_skipped() -> None:
    replica = Replica(EMPTY)
    with pytest.raises(Corrupt, match="cannot be read by this version"):
        replica.apply(Entry(1, 1, EntryKind.COMMAND, msgspec.msgpack.encode({"updates": [{"type": "of the future"}]})))


def test_a_replica_collects_unsaved_changes() -> None:
    replica = Replica(EMPTY)
    command = Command(updates=(Put(record=DynamicConfig(resource="a")),))
    replica.apply(Entry(1, 1, EntryKind.COMMAND, msgspec.msgpack.encode(command)))
    replica.apply(entry(2))
    assert set(replica.take_unsaved()) == {"dynamic_config/a"}
    assert replica.take_unsaved() == {}
    assert replica.image() == StateImage(index=2, term=1, records=[Versioned(1, DynamicConfig(resource="a"))])


# --- proposals -------------------------------------------------------------------------------------------------------


class Answered:
    def __init__(self) -> None:
        self.answers: list[CommandAnswer] = []

    def __call__(self, answers: Sequence[CommandAnswer]) -> None:
        assert not self.answers, "a batch is answered once"
        self.answers = list(answers)

    @property
    def codes(self) -> list[str]:
        return [answer.error.code if answer.error else "done" for answer in self.answers]


def test_a_batch_is_answered_when_all_are_decided() -> None:
    pending, answered = PendingProposals(), Answered()
    pending.add(5, 1, 2, answered)
    pending.applied(5, 1, Applied(index=5, allocated=(7,)))
    assert not answered.answers
    pending.applied(6, 1, Corrupt("as an example"))
    assert answered.codes == ["done", "corrupt"]
    assert answered.answers[0].allocated == (7,)


def test_a_replaced_entry_certainly_had_no_effect() -> None:
    pending, answered = PendingProposals(), Answered()
    pending.add(5, 1, 1, answered)
    pending.applied(5, 2, None)
    assert answered.codes == ["not_leader"]


def test_an_entry_replaced_by_this_very_node_may_still_be_committed_by_another() -> None:
    pending, first, second = PendingProposals(), Answered(), Answered()
    pending.add(5, 1, 1, first)
    pending.add(5, 3, 1, second)
    assert first.codes == ["outcome_unknown"]
    pending.applied(5, 3, Applied(index=5))
    assert second.codes == ["done"]


def test_outcomes_that_cannot_be_learned_are_unknown() -> None:
    pending, old, new = PendingProposals(), Answered(), Answered()
    pending.add(5, 1, 1, old)
    pending.add(9, 3, 1, new)
    pending.forget_before_term(3)
    assert old.codes == ["outcome_unknown"]
    pending.forget(up_to=9)
    assert new.codes == ["outcome_unknown"]
    assert len(pending) == 0
