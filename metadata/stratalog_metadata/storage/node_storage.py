"""A node's durable state: vote, log and store, opened together and checked against each other. All calls block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from stratalog_core.errors import Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Files
from stratalog_metadata.raft import HardState, LogTail, Ready
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage.identity import REPLACE
from stratalog_metadata.storage.raft_log import DurableLog, LogWrite
from stratalog_metadata.storage.state_store import StateStore

LOG_DIRECTORY = "raft"
INSTALLING_FILE = f"{LOG_DIRECTORY}/installing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    hard_state: HardState
    tail: LogTail
    image: StateImage


class NodeStorage:
    """Calls on the log must not overlap each other, nor calls on the store, which it closes: here, too, if it raises."""

    def __init__(self, files: Files, store: StateStore, segment_bytes_max: int, *, must_exist: bool = False) -> None:
        self.store = store
        self._files = files
        with ExitStack() as unless_open:
            unless_open.callback(store.close)
            self.log, hard_state, tail = DurableLog.open(files, LOG_DIRECTORY, segment_bytes_max, must_exist=must_exist)
            unless_open.callback(self.log.close)
            image = store.load()
            self.recovered = Recovered(hard_state=hard_state, tail=self._joined(hard_state, tail, image), image=image)
            unless_open.pop_all()

    def _joined(self, hard_state: HardState, tail: LogTail, image: StateImage) -> LogTail:
        if image.index > 0 and hard_state.term < image.term:
            raise Corrupt("the state is there but the raft log and vote are not: this node might vote twice; do not start it")
        if image.index < tail.base_index:
            raise Corrupt(f"the state ends at {image.index}, but the raft log begins after {tail.base_index}")
        if not tail.matches(image.index, image.term):
            if self._installing() != (image.index, image.term):
                raise Corrupt(
                    f"the state stands at entry {image.index} of term {image.term}, which was durable in the raft log once and"
                    f" is not in it: restore raft/ from a copy, or replace this node: {REPLACE}"
                )
            # The node stopped after it stored a snapshot and before it reset the log.
            self.log.persist([LogWrite(reset_to=(image.index, image.term))])
            tail = LogTail(image.index, image.term)
        self._installed()
        return tail

    def _installing(self) -> tuple[int, int]:
        """Index and term of a snapshot whose installation was interrupted; zeros if there is none."""
        if not self._files.exists(INSTALLING_FILE):
            return (0, 0)
        try:
            return msgspec.json.decode(self._files.read(INSTALLING_FILE), type=tuple[int, int])
        except MALFORMED as malformed:
            raise Corrupt(f"{INSTALLING_FILE} is malformed: {malformed}") from malformed

    def _installed(self) -> None:
        if self._files.exists(INSTALLING_FILE):
            self._files.remove(INSTALLING_FILE)
            self._files.sync_directory(LOG_DIRECTORY)

    def persist(self, readies: Sequence[Ready]) -> StateImage | None:
        """Make these instructions durable. Returns the last snapshot's image, if they contain one."""
        image = None
        snapshots = [ready.snapshot for ready in readies if ready.snapshot is not None]
        if snapshots:
            # The term first: a state of a later term than the vote file's would look like a lost log.
            states = [ready.hard_state for ready in readies if ready.hard_state is not None]
            self.log.persist([LogWrite(hard_state=state) for state in states[-1:]])
            image = snapshot.decode(snapshots[-1].content)
            self._files.write_atomic(INSTALLING_FILE, msgspec.json.encode((image.index, image.term)))
            self.store.replace(image)
        self.log.persist([_log_write(ready) for ready in readies])
        if snapshots:
            self._installed()
        return image

    def close(self) -> None:
        self.log.close()
        self.store.close()


def _log_write(ready: Ready) -> LogWrite:
    return LogWrite(
        hard_state=ready.hard_state,
        reset_to=(ready.snapshot.index, ready.snapshot.term) if ready.snapshot is not None else None,
        entries=ready.entries,
        previous_term=ready.previous_term,
    )
