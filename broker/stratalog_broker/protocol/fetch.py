"""Fetch responses, versions 4–18, encoded by hand as a list of buffers; batches are included as views, without a copy.

The layout is that of Kafka's FetchResponse.json; a property test compares it with kio. Version 5 adds the log start offset, 7
the session, 11 the preferred replica; 12 is flexible, with the diverging epoch and the current leader as tagged fields; 13
names topics by id; 16 adds the leaders' endpoints.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from stratalog_broker.protocol.frame import write_uvarint
from stratalog_broker.protocol.produce import Leader, encode_leader, encode_node_endpoints
from stratalog_core.ports import Buffer

FLEXIBLE_VERSION: Final = 12
TOPIC_ID_VERSION: Final = 13
ENDPOINTS_VERSION: Final = 16
_DIVERGING_TAG: Final = 0
_LEADER_TAG: Final = 1

_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_HEAD_7 = struct.Struct(">ihi")
_PARTITION_4 = struct.Struct(">ihqq")
_PARTITION_5 = struct.Struct(">ihqqq")
_PARTITION_12 = struct.Struct(">ihqqqBi")
_EMPTY_12 = struct.Struct(">ihqqqBiBB")
_ABORTED = struct.Struct(">qq")
_DIVERGING = struct.Struct(">BBiqB")


class PartitionFetched(NamedTuple):
    """The response for one partition. ``aborted`` is None for read_uncommitted, as in Kafka."""

    partition: int
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    batches: Sequence[Buffer] = ()
    batches_bytes: int = 0
    aborted: Sequence[tuple[int, int]] | None = None
    leader: Leader | None = None
    diverging: tuple[int, int] | None = None
    """The largest epoch not above the client's, and its end offset, if the client has other records (KIP-595)."""
    preferred_replica: int = -1
    """Broker to fetch from instead (KIP-392); -1: this one."""

    @property
    def has_rare_fields(self) -> bool:
        return self.leader is not None or self.diverging is not None or self.preferred_replica >= 0


TopicFetched = tuple[bytes, Sequence[PartitionFetched]]


def encode_response(
    topics: Sequence[TopicFetched], version: int, *, error_code: int = 0, session_id: int = 0, throttle_ms: int = 0
) -> tuple[list[Buffer], int]:
    """Return ``(buffers, bytes)`` of the body. Topic keys are names in UTF-8, from version 13 on ids."""
    encoder = _Encoder(version)
    out = encoder.out
    out += _HEAD_7.pack(throttle_ms, error_code, session_id) if version >= 7 else _I32.pack(throttle_ms)
    flexible = encoder.flexible
    out += write_uvarint(len(topics) + 1) if flexible else _I32.pack(len(topics))
    for key, partitions in topics:
        if version < TOPIC_ID_VERSION:
            out += write_uvarint(len(key) + 1) if flexible else _I16.pack(len(key))
        out += key
        out += write_uvarint(len(partitions) + 1) if flexible else _I32.pack(len(partitions))
        out = encoder.partitions(partitions)
        if flexible:
            out.append(0)
    encoder.finish()
    return encoder.parts, encoder.size


class _Encoder:
    """Collects small fields in the buffer ``out`` and starts a new one after each run of batches."""

    __slots__ = ("flexible", "leaders", "out", "parts", "size", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.flexible = version >= FLEXIBLE_VERSION
        self.parts: list[Buffer] = []
        self.size = 0
        self.out = bytearray()
        self.leaders: dict[int, Leader] = {}

    def partitions(self, partitions: Sequence[PartitionFetched]) -> bytearray:
        """Encode all partitions of one topic; return the buffer to which the next fields are appended."""
        for fetched in partitions:
            if not self.flexible:
                self._plain(fetched)
            elif fetched.aborted or fetched.has_rare_fields:
                self._flexible(fetched)
            elif fetched.batches_bytes:
                self.out += _PARTITION_12.pack(*fetched[:5], 0 if fetched.aborted is None else 1, -1)
                self.out += write_uvarint(fetched.batches_bytes + 1)
                self._batches(fetched)
                self.out.append(0)
            else:
                self.out += _EMPTY_12.pack(*fetched[:5], 0 if fetched.aborted is None else 1, -1, 1, 0)
        return self.out

    def _flexible(self, fetched: PartitionFetched) -> None:
        """Encode a partition with rare fields: aborted transactions, a diverging epoch, another leader, a preferred replica."""
        self.out += _PARTITION_5.pack(*fetched[:5])
        self.out += b"\x00" if fetched.aborted is None else write_uvarint(len(fetched.aborted) + 1)
        for pair in fetched.aborted or ():
            self.out += _ABORTED.pack(*pair) + b"\x00"
        self.out += _I32.pack(fetched.preferred_replica)
        self.out += write_uvarint(fetched.batches_bytes + 1)
        self._batches(fetched)
        self.out.append((fetched.diverging is not None) + (fetched.leader is not None))
        if fetched.diverging is not None:
            self.out += _DIVERGING.pack(_DIVERGING_TAG, _DIVERGING.size - 2, *fetched.diverging, 0)
        if fetched.leader is not None:
            self.out += encode_leader(_LEADER_TAG, fetched.leader)
            self.leaders[fetched.leader.broker_id] = fetched.leader

    def _plain(self, fetched: PartitionFetched) -> None:
        self.out += _PARTITION_5.pack(*fetched[:5]) if self.version >= 5 else _PARTITION_4.pack(*fetched[:4])
        self.out += _I32.pack(-1 if fetched.aborted is None else len(fetched.aborted))
        for pair in fetched.aborted or ():
            self.out += _ABORTED.pack(*pair)
        if self.version >= 11:
            self.out += _I32.pack(fetched.preferred_replica)
        self.out += _I32.pack(fetched.batches_bytes)
        self._batches(fetched)

    def _batches(self, fetched: PartitionFetched) -> None:
        if fetched.batches_bytes:
            self.parts.append(self.out)
            self.parts.extend(fetched.batches)
            self.size += len(self.out) + fetched.batches_bytes
            self.out = bytearray()

    def finish(self) -> None:
        if self.flexible:
            endpoints = list(self.leaders.values()) if self.version >= ENDPOINTS_VERSION else []
            self.out += encode_node_endpoints(0, endpoints) if endpoints else b"\x00"
        self.parts.append(self.out)
        self.size += len(self.out)
