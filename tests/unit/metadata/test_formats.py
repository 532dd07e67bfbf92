"""Golden bytes of everything that is stored or travels: tests/golden/metadata/bytes.txt.

A line is a name and the bytes in hexadecimal. Existing lines must always encode to the same bytes and stay readable; new lines
are added by STRATALOG_GOLDEN=write.
"""

from __future__ import annotations

import os
import typing
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from stratalog_metadata.raft import Entry, EntryKind, HardState, Message
from stratalog_metadata.raft.membership import Member, Membership, encode_members
from stratalog_metadata.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from stratalog_metadata.records import (
    Bookie,
    Broker,
    Cluster,
    Counter,
    DeferredMarker,
    DeletedTopic,
    DrainedBroker,
    DynamicConfig,
    ForkDecision,
    Fragment,
    KnownLedgers,
    Lease,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Partition,
    PendingTopic,
    Quorum,
    Record,
    RestoredTopic,
    Session,
    TieringWorker,
    TierRequest,
    TierStatus,
    Topic,
    Versioned,
)
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.commands import (
    Allocate,
    Command,
    Delete,
    EpochIs,
    ExpireSession,
    OpenSession,
    Put,
    SessionAlive,
    VersionIs,
)
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage import raft_log_format as log_format

GOLDEN = Path(__file__).parents[2] / "golden" / "metadata" / "bytes.txt"
TOPIC = UUID("0123456789abcdef0123456789abcdef")
RECORDS: list[Record] = [
    Bookie(bookie_id="b1", address="h:1", cookie="c", session_id=5, rack="r", read_only=True),
    Broker(broker_id=1, host="h", port=9092, session_id=7, rack="r"),
    Cluster(cluster_id="abcdefghijklmnopqrstuv"),
    Counter(name="ledger_ids", next_value=1000),
    DrainedBroker(broker_id=3),
    DeletedTopic(topic_id=TOPIC, name="t", deleted_at_ms=1_700_000_000_000),
    PendingTopic(topic_id=TOPIC, name="flights", expires_at_ms=1_700_000_000_000),
    RestoredTopic(topic_id=TOPIC),
    KnownLedgers(ledger_ids=(3, 70_000)),
    DeferredMarker(
        topic_id=TOPIC, index=3, leader_epoch=4, producer_id=1001, producer_epoch=7, coordinator_epoch=2, is_commit=True
    ),
    DynamicConfig(resource="1", configs={"key": "value"}),
    Lease(name="offload/t/0", session_id=9),
    Ledger(
        ledger_id=258,
        topic_id=TOPIC,
        partition=3,
        base_offset=100,
        leader_epoch=4,
        write_quorum=3,
        ack_quorum=2,
        fragments=(Fragment(first_entry=0, bookies=("b1", "b2", "b3")), Fragment(first_entry=7, bookies=("b1", "b4", "b3"))),
        state=LedgerState.CLOSED,
        last_entry=9,
        payload_bytes=12345,
        end_offset=200,
        closed_at_ms=1_700_000_000_000,
    ),
    Log(topic_id=TOPIC, index=3, ledgers=(LedgerRef(ledger_id=258, base_offset=100, leader_epoch=4),), log_start_offset=50),
    ManifestPointer(
        topic_id=TOPIC,
        index=3,
        manifest_version=2,
        object_key="k",
        sha256="ab",
        start_offset=50,
        end_offset=100,
        cold_bytes=999,
    ),
    ForkDecision(topic_id=TOPIC, index=3, keep="store", metadata_key="m", store_key="s", decided_at_ms=1, decided_by="p"),
    Partition(topic_id=TOPIC, index=3, owner=1, leader_epoch=4, owner_session=7),
    Quorum(members=(Member(node_id=1, identity="u", address="h:1"), Member(node_id=4, identity="v", voter=False))),
    Session(session_id=7, holder="broker 1", lease_ms=3000),
    TierRequest(topic_id=TOPIC, index=3, end_offset=100, delete_hot=True),
    TierStatus(topic_id=TOPIC, index=3, worker_id="w", offloaded_at_ms=1, last_error="e", last_error_at_ms=2),
    TieringWorker(worker_id="w", session_id=8),
    Topic(name="t", topic_id=TOPIC, partition_count=12, replication_factor=3, configs={"retention.ms": "1"}, internal=True),
]
COMMAND = Command(
    updates=(
        Put(record=RECORDS[2]),
        Delete(key="k"),
        Allocate(counter="c", count=5),
        OpenSession(holder="h", lease_ms=3000),
        ExpireSession(session_id=7),
    ),
    requirements=(
        VersionIs(key="k", version=3),
        EpochIs(key="p", owner=1, leader_epoch=4),
        SessionAlive(session_id=7),
    ),
)
ENTRY = Entry(300, 4, EntryKind.COMMAND, b"payload")
MESSAGES: list[Message] = [
    VoteRequest(sender=1, receiver=2, term=5, last_index=300, last_term=4, pre=True),
    VoteReply(sender=2, receiver=1, term=5, granted=True, pre=True),
    Append(sender=1, receiver=2, term=5, previous_index=299, previous_term=4, commit=298, entries=(ENTRY,)),
    AppendReply(sender=2, receiver=1, term=5, index=299, rejected=True, hint_index=280, hint_term=3),
    Heartbeat(sender=1, receiver=2, term=5, commit=298, round=77, identity="v"),
    HeartbeatReply(sender=2, receiver=1, term=5, round=77),
    SnapshotChunk(
        sender=1,
        receiver=2,
        term=5,
        index=250,
        index_term=4,
        total_bytes=10,
        checksum=12345,
        position=4,
        content=b"x",
        members=(Member(node_id=1, identity="u", address="h:1"),),
    ),
    SnapshotReply(sender=2, receiver=1, term=5, index=250, position=5),
    TimeoutNow(sender=1, receiver=2, term=5),
]

FULL: dict[str, Record] = {
    "DeletedTopic that can be restored": DeletedTopic(
        topic_id=TOPIC,
        name="t",
        deleted_at_ms=1_700_000_000_000,
        restorable_ms=86_400_000,
        topic=Topic(name="t", topic_id=TOPIC, partition_count=2, replication_factor=3, configs={"retention.ms": "1"}),
        leader_epochs=(4, 7),
        replicas=((1, 2), ()),
    ),
    "DeletedTopic that is being forgotten": DeletedTopic(
        topic_id=TOPIC, name="t", deleted_at_ms=1_700_000_000_000, partitions_left=5_000
    ),
    "Bookie with ledger ids": Bookie(bookie_id="b2", address="h:2", cookie="c", greatest_ledger_id=77),
    "Log that was restored": Log(
        topic_id=TOPIC, index=3, log_start_offset=120, restored_from="coordinators/__consumer_offsets/3/x.state"
    ),
    "Counter with lost ids": Counter(name="ledger_ids", next_value=2000, lost_below=1500),
}
"""Records with members that are left out where they have their defaults."""

VOTE_OF_VERSION_1 = bytes.fromhex("534c56540001000000000000000500000000000000027a4abf7c")


def written() -> dict[str, bytes]:
    """Everything as it is written now, by name."""
    encode = msgspec.msgpack.encode
    bytes_by_name = {f"record {type(record).__name__}": encode(record) for record in RECORDS}
    bytes_by_name |= {f"record {name}": encode(record) for name, record in FULL.items()}
    bytes_by_name["command"] = encode(COMMAND)
    bytes_by_name |= {f"raft {type(message).__name__}": encode(message) for message in MESSAGES}
    bytes_by_name["members"] = encode_members(Membership.of([Member(node_id=1, identity="u", address="h:1")]))
    bytes_by_name["log segment"] = log_format.pack_segment(300, 4, reset=True)
    bytes_by_name["log record"] = log_format.pack_record(ENTRY, 3, 32)
    bytes_by_name["vote"] = log_format.pack_vote(HardState(term=5, voted_for=2), log_format.LogMark(segment=7, end=4096))
    bytes_by_name["snapshot"] = snapshot.encode(StateImage(index=300, term=4, records=[Versioned(299, RECORDS[2])]))
    return bytes_by_name


def golden() -> dict[str, bytes]:
    lines = GOLDEN.read_text().splitlines() if GOLDEN.exists() else []
    return {name: bytes.fromhex(content) for name, _, content in (line.partition(": ") for line in lines)}


def test_every_kind_of_record_has_golden_bytes() -> None:
    assert {type(record) for record in RECORDS} == set(typing.get_args(Record))
    assert {type(message) for message in MESSAGES} == set(typing.get_args(Message))


def test_written_bytes_never_change() -> None:
    now = written()
    if os.environ.get("STRATALOG_GOLDEN") == "write":
        GOLDEN.write_text("".join(f"{name}: {content.hex()}\n" for name, content in now.items()))
    assert now == golden()


def test_old_bytes_stay_readable() -> None:
    stored = golden()
    decode = msgspec.msgpack.decode
    assert [decode(stored[f"record {type(record).__name__}"], type=Record) for record in RECORDS] == RECORDS
    assert {name: decode(stored[f"record {name}"], type=Record) for name in FULL} == FULL
    assert decode(stored["command"], type=Command) == COMMAND
    assert [decode(stored[f"raft {type(message).__name__}"], type=Message) for message in MESSAGES] == MESSAGES
    header = log_format.unpack_segment(memoryview(stored["log segment"]))
    assert header == log_format.SegmentHeader(base_index=300, base_term=4, reset=True)
    record = log_format.unpack_record(memoryview(stored["log record"]), 0)
    assert record is not None
    assert (record.entry, record.previous_term, record.batch_position) == (ENTRY, 3, 32)
    vote = HardState(term=5, voted_for=2), log_format.LogMark(segment=7, end=4096)
    assert log_format.unpack_vote(stored["vote"]) == vote
    assert log_format.unpack_vote(VOTE_OF_VERSION_1) == (HardState(term=5, voted_for=2), None)
    assert snapshot.decode(stored["snapshot"]).records == [Versioned(299, RECORDS[2])]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_records_key_begins_with_its_kind(record: Record) -> None:
    """``RecordMap`` and views find a kind by its tag."""
    assert record.key().startswith(f"{record.__struct_config__.tag}/")
