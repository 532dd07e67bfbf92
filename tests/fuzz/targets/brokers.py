"""Kafka requests as bytes, batches that are produced, and what brokers keep in ledgers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from uuid import UUID

from fuzz import seals
from fuzz.kafka_requests import sound_frames
from fuzz.target import Target
from fuzz.targets.batches import sound_batches
from stratalog_broker.coordination.groups.core import records
from stratalog_broker.coordination.groups.core.messages import GroupImage, MemberImage
from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.handlers import HANDLERS
from stratalog_broker.protocol.entities import decode_request, encode_response
from stratalog_broker.protocol.frame import parse_head
from stratalog_broker.protocol.produce import parse_request
from stratalog_broker.requests.produce_checks import Refused, check_produced
from stratalog_core.batches.batch import assign_log_append_time, assign_offset
from stratalog_core.batches.checkpoint import (
    Checkpoint,
    EpochStart,
    ProducerEntry,
    SequencedBatch,
    decode_checkpoint,
    encode_checkpoint,
    is_checkpoint,
)
from stratalog_core.partition_state.producer_states import ProducerStates
from stratalog_metadata.records import Topic
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs

PRODUCE = 0
_CONFIGS = TopicConfigs.of(Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=1), {})


def parse_frame(content: bytes) -> None:
    """A whole request; what was understood must be fit to be written again."""
    frame = memoryview(content)
    head = parse_head(frame)
    info = HANDLERS.get(head.api_key)
    if info is None or not info.min_version <= head.api_version <= info.max_version:
        return
    body = frame[head.body_start :]
    if head.api_key == PRODUCE:
        parse_request(body, head.api_version)
    else:
        encode_response(decode_request(head.api_key, head.api_version, body))


def check_batch(content: bytes) -> None:
    batch = memoryview(bytearray(seals.opened(content, seals.batches)))
    try:
        header = check_produced(batch, _CONFIGS, 1_700_000_000_000)
    except Refused:
        return
    producers = ProducerStates(10)
    producers.judge(header)
    assign_offset(batch, 2**40, 3)
    assign_log_append_time(batch, 1_700_000_000_000)


# -- consumer groups


def images() -> list[GroupImage]:
    member = MemberImage(
        member_id="m", group_instance_id=None, client_id="c", client_host="/h", rebalance_timeout_ms=1, session_timeout_ms=2,
        subscription=b"\x00\x01\x00\x00\x00\x01\x00\x01t", assignment=b"a",
    )  # fmt: skip
    return [
        GroupImage(
            group_id="g", protocol_type="consumer", generation=3, protocol_name="range", leader="m", state_since_ms=5,
            members=(member,),
        )
    ]  # fmt: skip


def _pair(key: bytes, value: bytes | None, header: bytes = b"") -> bytes:
    return struct.pack(">HHB", len(key), len(value or b""), value is None) + key + (value or b"") + header


def group_records() -> list[bytes]:
    offset = CommittedOffset(offset=5, leader_epoch=1, metadata="m", committed_at_ms=9)
    key = records.encode_offset_key(OffsetKey("g", "t", 1))
    group = records.encode_group_key("g")
    return [
        _pair(key, records.encode_offset_value(offset), bytes(16)),
        _pair(key, None),
        _pair(group, records.encode_group_value(images()[0])),
        _pair(group, None),
    ]


def apply_record(content: bytes) -> None:
    """Two lengths and a flag, then key, value and topic id; whatever was applied must survive a snapshot."""
    if len(content) < 5:
        return
    key_bytes, value_bytes, is_null = struct.unpack_from(">HHB", content)
    key, rest = content[5 : 5 + key_bytes], content[5 + key_bytes :]
    value, header = rest[:value_bytes], rest[value_bytes:]
    store = GroupStore()
    store.begin_batch()(key, None if is_null & 1 else value, ((records.TOPIC_ID_HEADER, header),) if header else ())
    for image in store.images.values():
        for member in image.members:
            records.subscribed_topics(member.subscription)
        records.encode_group_value(image)
    GroupStore.from_snapshot(store.snapshot())


def snapshots() -> Sequence[bytes]:
    store = GroupStore()
    for one in group_records()[::2]:
        apply_into(store, one)
    return [store.snapshot(), GroupStore().snapshot()]


def apply_into(store: GroupStore, content: bytes) -> None:
    key_bytes, value_bytes, _ = struct.unpack_from(">HHB", content)
    store.begin_batch()(content[5 : 5 + key_bytes], content[5 + key_bytes :][:value_bytes], ())


def restore_groups(content: bytes) -> None:
    GroupStore.from_snapshot(content).snapshot()


# -- checkpoint entries


def checkpoints() -> list[bytes]:
    state = Checkpoint(
        offset=9, leader_epochs=(EpochStart(1, 0),), producers=(ProducerEntry(5, 0, (SequencedBatch(0, 1, 3, 9),)),),
        application_state=b"state",
    )  # fmt: skip
    return [b"\x00" + part for part in encode_checkpoint(state)] + [
        b"\x10" + b"".join(encode_checkpoint(state, part_bytes_max=16))
    ]


def read_checkpoint(content: bytes) -> None:
    """The first byte is the size of a part without its header (0: it is one part)."""
    size = content[0] + 10 if content[:1] and content[0] else max(len(content) - 1, 1)
    parts = [content[start : start + size] for start in range(1, len(content), size)]
    for part in parts:
        is_checkpoint(part)
    for producer in decode_checkpoint(parts).producers:
        for batch in producer.batches:
            assert batch.base_offset <= batch.last_offset, "a batch does not end before it begins"


TARGETS = (
    Target(name="kafka-request", run=parse_frame, seeds=sound_frames),
    Target(name="produced-batch", run=check_batch, seeds=lambda: [seals.sealed(batch) for batch in sound_batches()]),
    Target(name="group-record", run=apply_record, seeds=group_records),
    Target(name="group-snapshot", run=restore_groups, seeds=snapshots),
    Target(name="checkpoint", run=read_checkpoint, seeds=checkpoints),
)
