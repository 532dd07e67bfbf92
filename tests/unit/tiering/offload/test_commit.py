"""The commit's decisions, alone and against a real metadata node: after an unknown outcome nothing is deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from unit.tiering.unreliable_metadata import UnreliableMetadata

from stratalog_core.errors import Conflict, OutcomeUnknown
from stratalog_metadata.records import ManifestPointer, Versioned
from stratalog_metadata.state.commands import Applied, Command, Put, VersionIs
from stratalog_tiering.offload import commit
from stratalog_tiering.offload.commit import commit_manifest

Cluster = Any
Batches = Callable[..., list[bytes]]


def pointer(key: str) -> ManifestPointer:
    return ManifestPointer(
        topic_id=UUID(int=1),
        index=0, manifest_version=2, object_key=key, sha256="", start_offset=0, end_offset=1, cold_bytes=1,
    )  # fmt: skip


def segment_count(directory: Path) -> int:
    return len(list(directory.glob("segments/*/*/*")))


@pytest.mark.parametrize("applied", [[True], [False], [False, True], [False, False, True]])
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
    assert segment_count(store_directory) == 1
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
    assert [key.split("/")[0] for key in deleted] == ["segments"]
    assert segment_count(store_directory) == 1
    assert cluster.pointer().object_key not in deleted


async def test_an_unknown_outcome_deletes_nothing(
    cluster: Cluster, make_batches: Batches, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "COMMIT_TIMEOUT_S", 0.0)
    cluster.metadata = UnreliableMetadata(cluster.metadata, [False])
    await cluster.add_ledger(make_batches(0, [3, 4]), 0)
    await cluster.start_worker()
    await cluster.until(lambda: not cluster.log().ledgers)
    assert (cluster.pointer().manifest_version, cluster.pointer().end_offset) == (1, 7)
    assert segment_count(store_directory) == 2, "what might have been committed stays"
    assert not [key for name, key in cluster.store.calls if name == "delete"]


class Overtaken:
    """Metadata that applies a commit, loses the answer, and lets another worker commit the next version on top of it."""

    def __init__(self) -> None:
        self.stored = Versioned(5, pointer("before"))

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        if self.stored.version != 5:
            raise Conflict("another version", key=self.stored.record.key())
        self.stored = Versioned(9, pointer("built on ours"))
        raise OutcomeUnknown("the answer was lost")

    async def read(self, keys: Sequence[str], timeout_s: float = 10.0) -> list[Versioned | None]:
        return [self.stored]


async def test_a_version_that_another_worker_built_on_keeps_its_objects() -> None:
    """The other worker's manifest refers to the same segments."""
    deleted: list[str] = []

    async def delete_objects(keys: Sequence[str]) -> None:
        deleted.extend(keys)

    ports: Any = SimpleNamespace(metadata=Overtaken(), delete_objects=delete_objects)
    ours = pointer("ours")
    command = Command(updates=(Put(record=ours),), requirements=(VersionIs(key=ours.key(), version=5),))
    with pytest.raises(OutcomeUnknown):
        await commit_manifest(ports, ours, command, ["segments/ours"])
    assert deleted == []
