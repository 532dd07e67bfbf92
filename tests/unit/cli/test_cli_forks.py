"""``tier resolve-fork``: what it shows of both lines, and how it waits for the worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
import pytest_asyncio
from click.testing import CliRunner
from support.archive_writer import ArchiveWriter
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum

from stratalog.app import stratalog
from stratalog.tier.forks import decide_fork, fork_text, forked_partitions, only_fork, wait_for_resolution
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict, Invalid, NotFound, Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import KEEP_METADATA, KEEP_STORE, ForkDecision, ManifestPointer, Topic
from stratalog_metadata.state.commands import Applied, Command, Delete, Put
from stratalog_tiering.store import ObjectStore, open_store

TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=2, replication_factor=1)


@pytest_asyncio.fixture
async def quorum(tmp_path: Path) -> AsyncIterator[EmbeddedQuorum]:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path / "metadata", transport) as made:
        yield made
    await transport.close()


@pytest.fixture
def metadata(quorum: EmbeddedQuorum) -> QuorumClient:
    return quorum.client


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    background = ThreadBackground(2, "store")
    yield open_store(str(tmp_path / "store"), background=background, clock=SystemClock(), random=random.Random(1))
    background.close()


async def history(store: ObjectStore, versions: int) -> list[ManifestPointer]:
    writer = ArchiveWriter(store, TOPIC, SystemClock(), random.Random(2))
    pointers = []
    for offset in range(versions):
        batch = bytes(build_batch([Record(offset=offset, timestamp_ms=1, key=None, value=b"v")]))
        pointers.append((await writer.append(0, [batch]))[0])
    return pointers


async def test_both_lines_are_shown_and_one_is_decided(metadata: QuorumClient, store: ObjectStore) -> None:
    pointers = await history(store, 3)
    await metadata.propose(Command(updates=(Put(record=pointers[2]),)))
    assert await forked_partitions(metadata.view, store, [TOPIC]) == []
    await metadata.propose(Command(updates=(Put(record=pointers[0]),)))
    (forked,) = await forked_partitions(metadata.view, store, [TOPIC])
    text = fork_text(forked)
    assert "metadata: version 1, offsets 0 to 0, 1 records" in text
    assert "store:    version 3, offsets 0 to 2, 3 records" in text
    assert "stratalog tier resolve-fork flights 0 --keep metadata|store" in text
    assert only_fork([forked], "flights", 0) is forked
    with pytest.raises(NotFound, match="flights-1 has not forked"):
        only_fork([forked], "flights", 1)
    decision = await decide_fork(metadata, forked, KEEP_STORE, discard_hot=False)
    assert (decision.metadata_key, decision.store_key) == (pointers[0].object_key, pointers[2].object_key)
    assert metadata.view.find(ForkDecision, decision.key()) == decision


async def test_metadata_that_knows_of_no_manifest_is_shown(metadata: QuorumClient, store: ObjectStore) -> None:
    await history(store, 2)
    (forked,) = await forked_partitions(metadata.view, store, [TOPIC])
    assert "metadata: no manifest\n" in fork_text(forked)


@pytest.mark.parametrize(
    ("options", "goes"),
    [
        (["--keep", "store"], "metadata's history (version 1, offsets 0 to 0, 1 records"),
        (["--keep", "metadata"], "the store's history (version 3, offsets 0 to 2, 3 records"),
        (["--keep", "store", "--discard-hot"], "Hot ledgers that do not continue the store's history are deleted at once"),
    ],
)
async def test_a_decision_names_what_goes_and_needs_a_confirmation(
    quorum: EmbeddedQuorum, store: ObjectStore, tmp_path: Path, options: list[str], goes: str
) -> None:
    pointers = await history(store, 3)
    await quorum.client.propose(Command(updates=(Put(record=TOPIC), Put(record=pointers[0]))))
    where = ["--metadata", ",".join(quorum.addresses), "--store", str(tmp_path / "store")]
    command = ["tier", "resolve-fork", "flights", "0", *where]
    shown = await asyncio.to_thread(CliRunner().invoke, stratalog, command)
    assert shown.exit_code == 0
    refused = (await asyncio.to_thread(CliRunner().invoke, stratalog, [*command, *options])).exception
    assert isinstance(refused, Invalid)
    assert goes in refused.message
    assert "Standard input is not a terminal: give --yes to confirm" in refused.message
    assert not list(quorum.client.view.all(ForkDecision)), "nothing was decided"
    done = await asyncio.to_thread(CliRunner().invoke, stratalog, [*command, *options, "--yes", "--timeout", "0.1"])
    assert isinstance(done.exception, Unavailable), "no worker is running"
    await quorum.client.refresh(60)
    (decision,) = quorum.client.view.all(ForkDecision)
    assert decision.keep == options[1]


async def test_a_decision_that_takes_effect_late_replaces_no_later_one(
    metadata: QuorumClient, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator has interrupted the command that got no answer, and decided again."""
    pointers = await history(store, 3)
    await metadata.propose(Command(updates=(Put(record=pointers[0]),)))
    (forked,) = await forked_partitions(metadata.view, store, [TOPIC])
    late: asyncio.Queue[Command] = asyncio.Queue()

    async def deliver_late(command: Command, timeout_s: float = 10.0) -> Applied:
        await late.put(command)
        applied: Applied = await asyncio.get_running_loop().create_future()
        return applied

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "propose", deliver_late)
        interrupted = asyncio.create_task(decide_fork(metadata, forked, KEEP_METADATA, discard_hot=False))
        command = await late.get()
        interrupted.cancel()
    decision = await decide_fork(metadata, forked, KEEP_STORE, discard_hot=False)
    with pytest.raises(Conflict):
        await metadata.propose(command)
    assert metadata.view.find(ForkDecision, decision.key()) == decision
    await metadata.propose(Command(updates=(Put(record=pointers[2]), Delete(key=decision.key()))))
    with pytest.raises(Conflict):  # A worker has carried out the later one.
        await metadata.propose(command)


@pytest.mark.parametrize("end", ["carried out", "refused", "never"])
async def test_the_command_waits_for_the_worker(metadata: QuorumClient, store: ObjectStore, end: str) -> None:
    await history(store, 1)
    (forked,) = await forked_partitions(metadata.view, store, [TOPIC])
    decision = await decide_fork(metadata, forked, KEEP_STORE, discard_hot=False)
    if end == "never":
        with pytest.raises(Unavailable, match="is a tiering worker running"):
            await wait_for_resolution(metadata, decision, 0.1)
        return
    waiting = asyncio.create_task(wait_for_resolution(metadata, decision, 60))
    refused = msgspec.structs.replace(decision, refused="ledger 3 is open")
    update = Delete(key=decision.key()) if end == "carried out" else Put(record=refused)
    await metadata.propose(Command(updates=(update,)))
    if end == "refused":
        with pytest.raises(Invalid, match="ledger 3 is open"):
            await waiting
    else:
        await waiting
