"""The commit's decisions, alone and against a real metadata node: after an unknown outcome nothing is deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stratalog_core.errors import Conflict, OutcomeUnknown, SessionExpired, StratalogError, Unavailable
from stratalog_metadata.records import ManifestPointer, Versioned
from stratalog_metadata.state.commands import Applied, Command, Put
from stratalog_tiering.core.commit_protocol import ATTEMPTS_MAX, ManifestCommit, Next

Cluster = Any
Batches = Callable[..., list[bytes]]


def pointer(key: str) -> ManifestPointer:
    return ManifestPointer(
        topic_id="00000000-0000-0000-0000-000000000001",  # type: ignore[arg-type]
        index=0, manifest_version=2, object_key=key, sha256="", start_offset=0, end_offset=1, cold_bytes=1,
    )  # fmt: skip


OURS, OTHERS, BEFORE = Versioned(9, pointer("ours")), Versioned(8, pointer("others")), Versioned(5, pointer("before"))


def test_applied_is_committed() -> None:
    assert ManifestCommit("ours", 5).proposed(None) is Next.COMMITTED


@pytest.mark.parametrize(
    ("failure", "found", "expected"),
    [
        (Conflict(), OURS, Next.COMMITTED),
        (Conflict(), OTHERS, Next.LOST),
        (Conflict(), BEFORE, Next.LOST),
        (Conflict(), None, Next.LOST),
        (OutcomeUnknown(), OURS, Next.COMMITTED),
        (OutcomeUnknown(), OTHERS, Next.LOST),
        (OutcomeUnknown(), BEFORE, Next.PROPOSE),
    ],
)
def test_the_pointer_decides(failure: StratalogError, found: Versioned | None, expected: Next) -> None:
    core = ManifestCommit("ours", 5)
    assert core.proposed(failure) is Next.READ_POINTER
    assert core.pointer_read(found) is expected


def test_the_first_version_expects_no_pointer() -> None:
    core = ManifestCommit("ours", 0)
    core.proposed(OutcomeUnknown())
    assert core.pointer_read(None) is Next.PROPOSE


def test_what_stays_unknown_is_unknown() -> None:
    core = ManifestCommit("ours", 5)
    core.proposed(OutcomeUnknown())
    assert core.pointer_not_read() is Next.UNKNOWN
    assert ManifestCommit("ours", 5).proposed(SessionExpired()) is Next.UNKNOWN
    endless = ManifestCommit("ours", 5)
    steps = [endless.proposed(Unavailable()) for _ in range(ATTEMPTS_MAX)]
    assert steps == [Next.PROPOSE] * (ATTEMPTS_MAX - 1) + [Next.UNKNOWN]


def segment_count(directory: Path) -> int:
    return len(list(directory.glob("segments/*/*/*")))


class UnreliableMetadata:
    """A real client whose commits of manifests lose their answers, before or after they took effect."""

    def __init__(self, inner: Any, applied: Sequence[bool]) -> None:
        self._inner = inner
        self._applied = list(applied)
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        first = command.updates[0]
        if self._applied and isinstance(first, Put) and isinstance(first.record, ManifestPointer):
            self.lost += 1
            if self._applied.pop(0):
                await self._inner.propose(command, timeout_s)
            raise OutcomeUnknown("the answer was lost")
        result: Applied = await self._inner.propose(command, timeout_s)
        return result


@pytest.mark.parametrize("applied", [[True], [False], [False, True], [False] * ATTEMPTS_MAX, [False, False, True]])
async def test_lost_answers_lose_nothing_and_delete_nothing(
    cluster: Cluster, make_batches: Batches, store_directory: Path, applied: list[bool]
) -> None:
    real = cluster.metadata
    cluster.metadata = unreliable = UnreliableMetadata(real, applied)
    batches = make_batches(0, [3, 4])
    await cluster.add_ledger(batches, 0)
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    assert unreliable.lost == len(applied)
    assert (cluster.pointer().manifest_version, cluster.pointer().end_offset) == (1, 7)
    assert segment_count(store_directory) == (2 if len(applied) == ATTEMPTS_MAX else 1), "what might have been committed stays"
    assert not [key for name, key in cluster.store.calls if name == "delete"]


async def test_a_definite_loser_deletes_its_own_objects_only(
    cluster: Cluster, make_batches: Batches, store_directory: Path
) -> None:
    ledger = await cluster.add_ledger(make_batches(0, [3]), 0)
    taken = False

    async def interfere(command: Command, timeout_s: float = 10.0) -> Applied:
        """Somebody else changes the ledger between upload and commit, once."""
        nonlocal taken
        first = command.updates[0]
        if isinstance(first, Put) and isinstance(first.record, ManifestPointer) and not taken:
            taken = True
            await real.propose(Command(updates=(Put(record=ledger),)))
        result: Applied = await real.propose(command, timeout_s)
        return result

    real = cluster.metadata
    cluster.metadata = UnreliableMetadata(real, [])
    cluster.metadata.propose = interfere
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    deleted = [key for name, key in cluster.store.calls if name == "delete"]
    assert sorted(key.split("/")[0] for key in deleted) == ["manifests", "segments"]
    assert segment_count(store_directory) == 1
    assert cluster.pointer().object_key not in deleted
