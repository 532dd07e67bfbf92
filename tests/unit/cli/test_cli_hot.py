"""``bookie list|decommission``, ``ledger list|show|read``: rows, refusals and waiting, on a real quorum and a real bookie."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import msgspec
import pytest
from click.testing import CliRunner
from support.embedded_quorum import EmbeddedQuorum
from unit.bookies.disk.test_transient_errors import until
from unit.broker.hand_fed_view import HandFedView

from stratalog.app import stratalog
from stratalog.health.cluster import check_ledgers
from stratalog.health.disks import check_disks
from stratalog.health.finding import Verdict
from stratalog.hot.asking import with_remarks
from stratalog.hot.decommission import set_draining, wait_until_empty
from stratalog.hot.entries import entry_rows
from stratalog.hot.report import bookie_rows, ledger_document, ledger_rows
from stratalog.hot.scrub import BookieScrub, bookies_to_scrub
from stratalog_bookies.client import LedgerClient, LedgerSpec
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.node.server import BookieServer
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import DiskScrub
from stratalog_core.batches.checkpoint import MAGIC
from stratalog_core.batches.records import Record as KafkaRecord
from stratalog_core.batches.records import build_batch
from stratalog_core.errors import (
    Corrupt,
    Invalid,
    NoSuchLedger,
    NotEnoughBookies,
    NotFound,
    StratalogError,
    Unavailable,
)
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    Bookie,
    Fragment,
    Ledger,
    LedgerState,
    Record,
    Topic,
    bookie_key,
)
from stratalog_metadata.state.commands import Command, Put

TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=1, replication_factor=2)


async def _put(metadata: QuorumClient, *records: Record) -> None:
    await metadata.propose(Command(updates=tuple(Put(record=record) for record in records)))


async def _bookies(metadata: QuorumClient, *names: str) -> None:
    session_id = await metadata.open_session("bookies", 60_000, lambda: None)
    await _put(
        metadata, *(Bookie(bookie_id=name, address="h:1", cookie="c", rack="r", session_id=session_id) for name in names)
    )  # fmt: skip


def _ledger(number: int, *bookies: str, state: LedgerState = LedgerState.CLOSED) -> Ledger:
    return Ledger(
        ledger_id=number, topic_id=TOPIC.topic_id, partition=0, base_offset=100, leader_epoch=3, write_quorum=2, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=bookies),), state=state, last_entry=9, payload_bytes=1000, end_offset=110,
    )  # fmt: skip


async def test_bookies_and_ledgers_are_told(quorum: EmbeddedQuorum) -> None:
    metadata = quorum.client
    await _bookies(metadata, "b1", "b2")
    down = Bookie(bookie_id="b3", address="h:3", cookie="c")
    drained = Bookie(bookie_id="b4", address="h:4", cookie="c", draining=True)
    await _put(metadata, TOPIC, down, drained, _ledger(1, "b1", "b3"), _ledger(2, "b1", "b2", state=LedgerState.OPEN))
    rows = {row["bookie"]: (row["state"], row["fragments"]) for row in bookie_rows(metadata.view)}
    assert rows == {"b1": ("live", 2), "b2": ("live", 1), "b3": ("down", 1), "b4": ("decommissioned", 0)}
    first, second = ledger_rows(metadata.view, "flights")
    assert (first["ledger"], first["state"], first["entries"], first["lacking"]) == (1, "closed", 10, 1)
    assert (second["state"], second["entries"], second["bytes"], second["bookies"]) == ("open", None, None, ["b1", "b2"])
    document = ledger_document(metadata.view, 1)
    assert document["fragments"] == [{"first_entry": 0, "bookies": ["b1", "b3"], "down": ["b3"]}]
    with pytest.raises(NotFound, match="no topic 'nothing'"):
        ledger_rows(metadata.view, "nothing")
    with pytest.raises(NoSuchLedger, match="no ledger 3"):
        ledger_document(metadata.view, 3)


def test_copies_on_failed_disks_of_live_bookies_are_missing() -> None:
    view = HandFedView()
    healthy = Bookie(bookie_id="b1", address="h:1", cookie="c", session_id=1)
    damaged = Bookie(bookie_id="b2", address="h:2", cookie="c", session_id=2, disks=2, failed_disks=(1,))
    view.put(TOPIC, healthy, damaged, _ledger(1, "b1", "b2"), _ledger(2, "b1", "b2"))
    assert [(row["ledger"], row["lacking"]) for row in ledger_rows(view, None)] == [(1, 1), (2, 0)]
    assert [ledger_document(view, number)["fragments"][0]["down"] for number in (1, 2)] == [["b2"], []]
    finding = check_ledgers(view)
    assert (finding.verdict, finding.detail) == (Verdict.WARN, "1 of 2 are missing a copy")


async def test_a_bookie_that_is_needed_is_not_decommissioned(quorum: EmbeddedQuorum) -> None:
    metadata = quorum.client
    await _bookies(metadata, "b1", "b2")
    await _put(metadata, TOPIC)
    with pytest.raises(NotEnoughBookies, match=r"without b1, 1 bookies accept ledgers \(b2\), but some .* has 2 copies"):
        await set_draining(metadata, "b1", draining=True)
    with pytest.raises(NotFound, match="no bookie 'b9'"):
        await set_draining(metadata, "b9", draining=True)
    await _bookies(metadata, "b3")
    await set_draining(metadata, "b1", draining=True)
    await set_draining(metadata, "b1", draining=True)
    with pytest.raises(NotEnoughBookies):
        await set_draining(metadata, "b2", draining=True)
    await set_draining(metadata, "b1", draining=False)
    record = metadata.view.find(Bookie, bookie_key("b1"))
    assert record is not None
    assert (record.draining, record.rack, record.session_id != 0) == (False, "r", True)


async def test_the_wait_ends_when_no_ledger_names_the_bookie(quorum: EmbeddedQuorum) -> None:
    metadata = quorum.client
    await _put(metadata, _ledger(1, "b1", "b2"), _ledger(2, "b2", "b3"))
    with pytest.raises(Unavailable, match=r"b1 is still in 1 ledgers, 0 of them open, .* without b1, 0 bookies accept ledgers"):
        await wait_until_empty(metadata, "b1", 0.05, lambda left: None)
    told: list[int] = []
    waiting = asyncio.create_task(wait_until_empty(metadata, "b1", 60.0, told.append, 0.0))
    await _put(metadata, _ledger(1, "b3", "b2"))
    await waiting
    assert told[-1] == 0


async def test_the_wait_includes_ledgers_that_name_the_bookie_late(quorum: EmbeddedQuorum) -> None:
    """A recovery chooses a bookie, puts copies on it, and names it when it closes the ledger."""
    metadata, told = quorum.client, list[int]()
    waiting = asyncio.create_task(wait_until_empty(metadata, "b1", 60.0, told.append, 2.0))
    await until(lambda: told == [0])
    await _put(metadata, _ledger(1, "b1", "b2"))
    await until(lambda: told[-1] == 1 or waiting.done())
    assert not waiting.done()
    await _put(metadata, _ledger(1, "b3", "b2"))
    await waiting
    assert told[-1] == 0
    with pytest.raises(Unavailable, match="no ledger names b1 after 0 s, but one that is being written or recovered may"):
        await wait_until_empty(metadata, "b1", 0.2, told.append)


async def test_a_wait_that_times_out_says_what_hinders(quorum: EmbeddedQuorum) -> None:
    metadata = quorum.client
    await _bookies(metadata, "b2", "b3")
    await _put(metadata, TOPIC, _ledger(1, "b1", "b2"))
    with pytest.raises(Unavailable, match="closed ledgers are being copied"):
        await wait_until_empty(metadata, "b1", 0.05, lambda left: None)
    await _put(metadata, _ledger(2, "b1", "b2", state=LedgerState.OPEN))
    with pytest.raises(Unavailable, match=r"2 ledgers, 1 of them open, .* run `stratalog tier offload TOPIC` for flights\."):
        await wait_until_empty(metadata, "b1", 0.05, lambda left: None)
    internal = Topic(name="__offsets", topic_id=UUID(int=8), partition_count=1, replication_factor=2, internal=True)
    hot_only = Topic(
        name="clicks", topic_id=UUID(int=9), partition_count=1, replication_factor=2, configs={"remote.storage.enable": "false"}
    )  # fmt: skip
    others = [
        msgspec.structs.replace(_ledger(number, "b1", state=LedgerState.OPEN), topic_id=topic.topic_id)
        for number, topic in enumerate((internal, hot_only), 3)
    ]
    await _put(metadata, internal, hot_only, *others)
    with pytest.raises(
        Unavailable, match=r"TOPIC` for flights; those of __offsets, clicks are closed when .* ledger_idle_ms\."
    ):
        await wait_until_empty(metadata, "b1", 0.05, lambda left: None)


class _Silent:
    def on_first_copy(self, entry_id: int) -> None: ...
    def on_confirmed(self, lac: int) -> None: ...
    def on_failed(self, error: StratalogError) -> None: ...


@pytest.fixture
async def bookie(quorum: EmbeddedQuorum, tmp_path: Path) -> AsyncIterator[LedgerClient]:
    directory, transport = tmp_path / "disk", TcpTransport()
    settings = BookieSettings(
        bookie_id="b1", data_dirs=(str(directory),), log_file_bytes=1024 * 1024, spare_files=0, free_bytes_min=0
    )  # fmt: skip
    background = ThreadBackground(settings.threads, "bookie")
    server = BookieServer(
        settings, quorum.client, transport, [SystemFiles(directory)], SystemClock(), Random(1), background
    )  # fmt: skip
    await server.start()
    client = LedgerClient(quorum.client, transport, SystemClock(), Random(2))
    yield client
    await client.close()
    await server.close()
    background.close()
    await transport.close()


async def _written(client: LedgerClient, *payloads: bytes) -> Ledger:
    spec = LedgerSpec(
        topic_id=TOPIC.topic_id, partition=0, base_offset=5, leader_epoch=1, ensemble_size=1, write_quorum=1, ack_quorum=1
    )  # fmt: skip
    writer = await client.create(spec, updates=lambda ledger: (), listener=_Silent())
    for payload in payloads:
        writer.append(payload)
    return await writer.seal(7)


BATCH = bytes(build_batch([KafkaRecord(offset=5, timestamp_ms=1000, key=None, value=b"v")] * 2))


async def test_entries_are_read_and_checked(bookie: LedgerClient) -> None:
    ledger = await _written(bookie, MAGIC + b"...", BATCH)
    checkpoint, batch = [row async for row in entry_rows(bookie, ledger, 0, None)]
    assert checkpoint == {"entry": 0, "bytes": 7, "kind": "checkpoint"}
    assert (batch["entry"], batch["kind"], batch["base_offset"], batch["max_timestamp_ms"]) == (1, "batch", 5, 1000)
    assert [row["entry"] async for row in entry_rows(bookie, ledger, 1, 1)] == [1]
    with pytest.raises(Invalid, match="has entries 0 to 1"):
        [row async for row in entry_rows(bookie, ledger, 0, 2)]


async def test_a_batch_that_was_damaged_before_it_was_stored_is_told(bookie: LedgerClient) -> None:
    ledger = await _written(bookie, BATCH[:-1] + bytes((BATCH[-1] ^ 1,)))
    with pytest.raises(Corrupt):
        [row async for row in entry_rows(bookie, ledger, 0, None)]


def _invoke(*words: str) -> Any:
    done = CliRunner().invoke(stratalog, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def _followed(*words: str) -> str:
    done = CliRunner().invoke(stratalog, ["ledger", "read", *words, "--follow"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


async def test_damage_that_nobody_can_mend_fails_the_scrub_and_the_doctor(
    quorum: EmbeddedQuorum, bookie: LedgerClient, tmp_path: Path
) -> None:
    ledger = await _written(bookie, BATCH)
    await _put(quorum.client, TOPIC)
    (log,) = [path for path in (tmp_path / "disk" / "log").glob("*.log") if BATCH in path.read_bytes()]
    content = bytearray(log.read_bytes())
    content[content.index(BATCH) + 70] ^= 1
    log.write_bytes(content)
    where = ["--metadata", ",".join(quorum.addresses), "--json"]
    scrub = ["bookie", "scrub", "--all", "--wait", *where]
    done = await asyncio.to_thread(CliRunner().invoke, stratalog, scrub, catch_exceptions=False)
    assert done.exit_code == 6
    (disk,) = json.loads(done.stdout)["disks"]
    assert (disk["damaged"], disk["healed"], disk["unhealable"]) == (1, 0, 1)
    assert f"entry 0 of ledger {ledger.ledger_id}" in done.stderr
    (finding,) = [each for each in await check_disks(quorum.client.view) if each.verdict is Verdict.FAIL]
    assert "b1, disk 0: 1 corrupt entries" in finding.detail


async def test_a_scrub_that_stops_early_fails_and_says_where(
    quorum: EmbeddedQuorum, bookie: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _written(bookie, BATCH)

    def failing(*_: object) -> bool:
        raise OSError(errno.EIO, "the cookie cannot be written")

    monkeypatch.setattr(LogFiles, "repair_file", failing)
    scrub = ["bookie", "scrub", "b1", "--wait", "--metadata", ",".join(quorum.addresses), "--json"]
    done = await asyncio.to_thread(CliRunner().invoke, stratalog, scrub, catch_exceptions=False)
    assert done.exit_code == 1
    (disk,) = json.loads(done.stdout)["disks"]
    assert disk["state"] == "incomplete"
    assert disk["unchecked"].startswith("it stopped at the cookie, after 0 of ")
    assert "b1, disk 0 was not checked completely: it stopped at the cookie" in done.stderr


async def test_a_scrub_of_all_bookies_fails_if_one_with_copies_is_down(quorum: EmbeddedQuorum, bookie: LedgerClient) -> None:
    ledger = await _written(bookie, BATCH)
    down = [Bookie(bookie_id=name, address="127.0.0.1:1", cookie="c", session_id=0) for name in ("b8", "b9")]
    with_copy = msgspec.structs.replace(ledger, ledger_id=99, fragments=(Fragment(first_entry=0, bookies=("b9",)),))
    await _put(quorum.client, TOPIC, *down, with_copy)
    scrub = ["bookie", "scrub", "--all", "--wait", "--metadata", ",".join(quorum.addresses), "--json"]
    done = await asyncio.to_thread(CliRunner().invoke, stratalog, scrub, catch_exceptions=False)
    assert done.exit_code == 1
    assert "b9 was not checked: it is down, and ledgers have copies on it\n" in done.stderr
    assert "b8" not in done.stderr
    assert [disk["bookie"] for disk in json.loads(done.stdout)["disks"]] == ["b1"]


async def test_a_disk_that_is_gone_after_a_restart_is_not_scrubbed(quorum: EmbeddedQuorum, bookie: LedgerClient) -> None:
    """A bookie lists no scrub of a failed disk."""
    transport = TcpTransport()
    (found,) = bookies_to_scrub(quorum.client.view, "b1")
    scrub = BookieScrub(transport, found)
    scrub.disks = (DiskScrub(position=0), DiskScrub(position=1, number=1, running=True))
    with pytest.raises(Unavailable, match="b1 restarted during its scrub"):
        await scrub.ask()
    await transport.close()


async def test_a_bookie_that_metadata_cannot_be_right_about_says_so(quorum: EmbeddedQuorum, tmp_path: Path) -> None:
    """An id is allocated before its ledger is written: metadata that has not allocated it was restored from an old copy."""
    transport, background = TcpTransport(), ThreadBackground(8, "bookie")
    settings = BookieSettings(bookie_id="b1", data_dirs=(str(tmp_path / "disk"),), free_bytes_min=0, collect_interval_s=0.05)
    files = [SystemFiles(tmp_path / "disk")]
    server = BookieServer(settings, quorum.client, transport, files, SystemClock(), Random(1), background)
    await server.start()
    body = messages.encode(messages.LedgerIds(ledger_ids=(77,)))
    await transport.channel(server.address).call(messages.FENCE, (body,), 60.0)
    async with asyncio.timeout(60):
        while not (wrong := [each for each in await check_disks(quorum.client.view) if each.verdict is Verdict.FAIL]):  # noqa: ASYNC110 (the bookie looks by itself)
            await asyncio.sleep(0.02)
    assert wrong[0].detail.startswith("b1 deletes no ledgers: ")
    assert "restored from an old copy" in wrong[0].detail
    where = ("--metadata", ",".join(quorum.addresses), "--json")
    (row,) = (await asyncio.to_thread(_invoke, "bookie", "list", *where))["bookies"]
    assert row["remark"].startswith("deletes no ledgers: ")
    await server.close()
    rows = with_remarks(bookie_rows(quorum.client.view), {"b1": Unavailable("cannot connect")})
    assert rows[0]["remark"] == "does not answer: cannot connect"
    background.close()
    await transport.close()


async def test_a_scrub_whose_bookie_restarts_is_not_finished(quorum: EmbeddedQuorum, tmp_path: Path) -> None:
    transport, background = TcpTransport(), ThreadBackground(8, "bookie")
    with pytest.raises(Unavailable, match="no bookie is live"):
        bookies_to_scrub(quorum.client.view, None)
    settings = BookieSettings(bookie_id="b1", data_dirs=(str(tmp_path / "disk"),), free_bytes_min=0)
    scrub: BookieScrub | None = None
    for _ in range(2):
        files = [SystemFiles(tmp_path / "disk")]
        server = BookieServer(settings, quorum.client, transport, files, SystemClock(), Random(1), background)
        await server.start()
        if scrub is None:
            settings = replace(settings, listen=server.address)
            scrub = BookieScrub(transport, Bookie(bookie_id="b1", address=server.address, cookie="c"))
            await scrub.ask(start=True)
        else:
            with pytest.raises(Unavailable, match="b1 restarted during its scrub"):
                await scrub.ask()
        await server.close()
    background.close()
    await transport.close()


async def test_the_commands_print_json(quorum: EmbeddedQuorum, bookie: LedgerClient) -> None:
    ledger = await _written(bookie, BATCH)
    await _put(quorum.client, TOPIC)
    where = ("--metadata", ",".join(quorum.addresses), "--json")
    (row,) = (await asyncio.to_thread(_invoke, "bookie", "list", *where))["bookies"]
    assert (row["bookie"], row["state"], row["fragments"]) == ("b1", "live", 1)
    (row,) = (await asyncio.to_thread(_invoke, "ledger", "list", "flights", *where))["ledgers"]
    assert (row["ledger"], row["entries"], row["topic"]) == (ledger.ledger_id, 1, "flights")
    shown = await asyncio.to_thread(_invoke, "ledger", "show", str(ledger.ledger_id), *where)
    assert shown["write_quorum"] == 1
    (disk,) = (await asyncio.to_thread(_invoke, "bookie", "scrub", "b1", "--wait", *where))["disks"]
    assert (disk["state"], disk["damaged"], disk["unhealable"], disk["entries"]) == ("finished", 0, 0, 1)
    done = await asyncio.to_thread(_followed, str(ledger.ledger_id), *where[:2])
    assert [json.loads(line)["entry"] for line in done.splitlines()] == [0]
    (entry,) = (await asyncio.to_thread(_invoke, "ledger", "read", str(ledger.ledger_id), "--first", "0", *where))["entries"]
    assert (entry["kind"], entry["base_offset"]) == ("batch", 5)


@pytest.mark.parametrize(
    "words",
    [
        ("bookie", "decommission"),
        ("ledger", "show"),
        ("ledger", "show", "first"),
        ("ledger", "read", "1", "--first", "-1"),
        ("bookie", "scrub"),
        ("bookie", "scrub", "b1", "--all"),
        ("tier", "resolve-fork", "flights", "0", "--discard-hot"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(stratalog, list(words)).exit_code == 2
