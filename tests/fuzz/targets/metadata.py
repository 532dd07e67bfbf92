"""Requests to metadata nodes, messages between them, and the files in their directories."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from random import Random

import msgspec
from crc32c import crc32c

from fuzz import seals
from fuzz.target import Target, scratch_directory
from stratalog_core.errors import Invalid
from stratalog_core.system import SystemFiles
from stratalog_metadata.node.peers import decode_messages
from stratalog_metadata.protocol import messages
from stratalog_metadata.raft import Entry, EntryKind, HardState, LogTail, Membership, Raft, RaftSettings
from stratalog_metadata.records import Record, Versioned
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.digest import digest_of, hash_record
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage import identity
from stratalog_metadata.storage import raft_log_format as log_format
from stratalog_metadata.storage.raft_log_recovery import LogReplay
from stratalog_metadata.storage.state_store import FORMAT_VERSION, SqliteStore, row_checksum

GOLDEN = Path(__file__).parents[2] / "golden" / "metadata" / "bytes.txt"


@cache
def golden(kind: str) -> list[bytes]:
    """Recorded bytes whose name begins so."""
    lines = (line.rpartition(": ") for line in GOLDEN.read_text().splitlines())
    return [bytes.fromhex(content) for name, _, content in lines if name.startswith(kind)]


# -- messages

FORWARDED = messages.ForwardRequest(
    method=messages.PROPOSE, body=messages.encode(messages.ProposeRequest(commands=[b"\x81"])), timeout_ms=100
)
BODIES: tuple[msgspec.Struct, ...] = (
    messages.ProposeRequest(commands=[b"\x81"]),
    messages.ProposeAnswer(answers=[messages.CommandAnswer(index=3, error=messages.WireError("invalid", "m", {"key": [1]}))]),
    messages.RaftEnvelope(cluster_id="c", messages=msgspec.Raw(b"\x90")),
    messages.ReadRequest(keys=["topic/a"]),
    messages.ReadAnswer(index=3, records=[None]),
    messages.ScanRequest(prefix="topic/"),
    messages.ScanAnswer(index=3, records=[], last_key="k"),
    messages.WatchRequest(index=3, wait_ms=5),
    messages.WatchAnswer(index=3, changes=[[messages.KeyChange("topic/a", None)]]),
    messages.SnapshotRequest(index=1, position=2),
    messages.SnapshotAnswer(index=1, total_bytes=3, content=b"abc"),
    messages.RenewRequest(session_ids=[1, 2]),
    messages.RenewAnswer(alive=[1]),
    messages.StatusRequest(),
    FORWARDED,
    messages.HelloRequest(node_id=1, identity="i", address="a:1"),
    messages.HelloAnswer(node_id=1, identity="i", cluster_id="c", peers=[2, 3]),
    messages.ChangeRequest(node_id=4, address="127.0.0.1:1"),
)


def decode_body(content: bytes) -> None:
    """The first byte says which body it is."""
    kind = type(BODIES[content[0] % len(BODIES) if content else 0])
    made = messages.decode(memoryview(content[1:]), kind)
    messages.encode(made)
    if isinstance(made, messages.ProposeAnswer):
        for answer in made.answers:
            if answer.error is not None:
                messages.raised_error(answer.error)


def raft_messages() -> list[bytes]:
    one_by_one = [b"\x91" + content for content in golden("raft ")]
    together = golden("raft ")
    return [*one_by_one, bytes((0x90 + len(together),)) + b"".join(together)]


def raft_envelope() -> bytes:
    """One of each message, as a peer sends them."""
    return messages.encode(messages.RaftEnvelope(cluster_id="", messages=msgspec.Raw(raft_messages()[-1])))


def step_raft(content: bytes) -> None:
    """Messages to node 1 of three, each told to have come from node 2 or 3, as an honest but confused peer might send them."""
    arrived = decode_messages(content)
    log = LogTail(290, 4, [Entry(index, 4, EntryKind.COMMAND, b"payload") for index in range(291, 301)])
    core = Raft(
        RaftSettings(node_id=1), membership(), hard_state=HardState(term=4), log=log, applied=295, random=Random(1), now=0.0
    )
    now = 1.0
    for message in arrived[:20]:
        if message.receiver != 1:
            continue
        now += 0.3
        core.tick(now)
        try:
            core.step(message)
        except Invalid:
            continue
        core.validate_state()
        _drain(core)


def _drain(core: Raft) -> None:
    while (ready := core.ready()) is not None:
        for state in [ready.hard_state] if ready.hard_state is not None else []:
            log_format.pack_vote(state, log_format.LogMark())
        for entry in ready.entries:
            log_format.pack_record(entry, ready.previous_term, 32)
        core.persisted(ready.number)


def membership() -> Membership:
    return Membership.of_voters((1, 2, 3))


# -- commands


def apply_command(content: bytes) -> None:
    """As one that was committed: it takes effect or is refused, and what it left must be fit to be stored."""
    replica = Replica(StateImage(index=9, term=1, records=_records()))
    for index in (10, 11):
        replica.apply(Entry(index, 1, EntryKind.COMMAND, content))
    snapshot.encode(replica.image())


@cache
def _records() -> list[Versioned]:
    records = (msgspec.msgpack.decode(content, type=Record) for content in golden("record "))
    return [Versioned(5, record) for record in records]


# -- files


def seal_records(content: bytes) -> bytes:
    """CRCs of a segment's header and records, as far as lengths lead."""
    out = bytearray(content)
    header = log_format.SEGMENT_HEADER_BYTES
    if len(out) < header:
        return content
    out[header - 4 : header] = struct.pack(">I", crc32c(bytes(out[: header - 4])))
    position = header
    while position + log_format.RECORD_HEADER_BYTES <= len(out):
        (length,) = struct.unpack_from(">I", out, position + 12)
        payload = position + log_format.RECORD_HEADER_BYTES
        end = min(payload + length, len(out))
        struct.pack_into(">I", out, position + 8, crc32c(bytes(out[payload:end])))
        struct.pack_into(">I", out, position + 4, crc32c(bytes(out[position + 8 : payload])))
        position = end
    return bytes(out)


def log_segments() -> list[bytes]:
    entries = [Entry(index, 4, EntryKind.COMMAND, b"payload" * index) for index in range(1, 5)]
    segment = log_format.pack_segment(0, 0, reset=False)
    for previous, entry in zip((0, 4, 4, 4), entries, strict=True):
        segment += log_format.pack_record(entry, previous, len(segment))
    overruled = segment + log_format.pack_record(Entry(3, 5, EntryKind.NO_OP), 4, len(segment))
    return [seals.sealed(one) for one in (segment, overruled, log_format.pack_segment(9, 3, reset=True))]


def replay_log(content: bytes) -> None:
    segment = seals.opened(content, seal_records)
    for newest in (True, False):
        replay = LogReplay()
        replay.replay("log-1", segment, newest=newest)


def read_vote(content: bytes) -> None:
    log_format.unpack_vote(seals.opened(content, seals.trailing))


def read_snapshot(content: bytes) -> None:
    image = snapshot.decode(seals.opened(content, seals.trailing))
    snapshot.encode(Replica(image).image())


def open_sqlite(content: bytes) -> None:
    """A damaged database file, or a sound one with damaged rows: the first byte says which."""
    with scratch_directory() as directory:
        path = directory / "state.sqlite"
        if content[:1] and content[0] & 1:
            path.write_bytes(content[1:])
        else:
            _with_rows(path, content[1:])
        store = SqliteStore(path)
        try:
            store.load()
        finally:
            store.close()


def _with_rows(path: Path, content: bytes) -> None:
    """A database with one record, its checksum and digest right; a first byte of 255 stands where the applied index belongs."""
    SqliteStore(path).close()
    index, record = (content[:1], content[1:]) if content[:1] == b"\xff" else (1, content)
    digest = digest_of([hash_record("k", 1, record)])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO records VALUES ('k', 1, ?, ?)", (record, row_checksum("k", 1, record)))
        connection.execute("INSERT INTO applied VALUES (1, ?, ?, 1, ?)", (FORMAT_VERSION, index, digest))


@cache
def sqlite_files() -> Sequence[bytes]:
    with scratch_directory() as directory:
        path = directory / "state.sqlite"
        _with_rows(path, golden("record ")[0])
        return [b"\x01" + path.read_bytes(), *(b"\x00" + record for record in golden("record "))]


def claim_directory(content: bytes) -> None:
    with scratch_directory() as directory:
        (directory / identity.IDENTITY_FILE).write_bytes(content)
        identity.read(SystemFiles(directory))


TARGETS = (
    Target(
        name="metadata-messages",
        run=decode_body,
        seeds=lambda: [bytes((number,)) + messages.encode(body) for number, body in enumerate(BODIES)],
    ),
    Target(name="raft-messages", run=step_raft, seeds=raft_messages),
    Target(name="metadata-command", run=apply_command, seeds=lambda: golden("command")),
    Target(name="metadata-log", run=replay_log, seeds=log_segments),
    Target(
        name="metadata-vote",
        run=read_vote,
        seeds=lambda: [seals.sealed(vote) for vote in golden("vote")],
    ),
    Target(
        name="metadata-snapshot",
        run=read_snapshot,
        seeds=lambda: [seals.sealed(image) for image in golden("snapshot")],
    ),
    Target(name="metadata-sqlite", run=open_sqlite, seeds=sqlite_files),
    Target(
        name="metadata-identity",
        run=claim_directory,
        seeds=lambda: [msgspec.json.encode(identity.Identity(node_id=1, cluster_id="c" * 22))],
    ),
)
