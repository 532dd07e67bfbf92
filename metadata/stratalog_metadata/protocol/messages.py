"""Requests and answers of the metadata quorum's RPC methods 0x0100…: msgpack maps. docs/reference/protocols/metadata-rpc.md.

Field names are permanent; a field that is added has a default.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from stratalog_core.errors import Invalid, StratalogError, error_from_wire
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.raft.membership import Member
from stratalog_metadata.records import Versioned

PROPOSE: Final = 0x0100
RAFT: Final = 0x0101
READ: Final = 0x0102
SCAN: Final = 0x0103
WATCH: Final = 0x0104
SNAPSHOT: Final = 0x0105
RENEW: Final = 0x0106
STATUS: Final = 0x0107
HELLO: Final = 0x0108
CHANGE_MEMBERS: Final = 0x0109
LOADS: Final = 0x0110
FORWARD: Final = 0x0111
DIGESTS: Final = 0x0112

COMMAND_BYTES_MAX: Final = 32 * 1024 * 1024
PROPOSE_COMMANDS_MAX: Final = 10_000

Body = TypeVar("Body", bound=msgspec.Struct)


class ProposeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``commands`` are encoded ``Command`` structs, which become log entries as they are."""

    commands: list[bytes]


class WireError(msgspec.Struct, frozen=True, array_like=True):
    code: str
    message: str
    detail: dict[str, Any]


class CommandAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``index`` is the command's log index (0: it was not appended); ``error`` is why it had no effect."""

    index: int
    allocated: tuple[int, ...] = ()
    error: WireError | None = None


class ProposeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer per command, in order."""

    answers: list[CommandAnswer]


class RaftEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded Raft messages, one way: the answer is empty. ``cluster_id`` may be empty until the cluster's record exists.

    ``identity`` is that of the sender's disk, ``address`` where it can be reached now.
    """

    cluster_id: str
    messages: msgspec.Raw
    node_id: int = 0
    identity: str = ""
    address: str = ""


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Without keys only the read index is answered."""

    keys: list[str]


class ReadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    records: list[Versioned | None]


class ScanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the records whose key begins with ``prefix``, after the key ``after``."""

    prefix: str
    after: str = ""


class ScanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``last_key``: continue after it; empty at the end. Pages of one scan may be of different moments."""

    index: int
    records: list[Versioned]
    last_key: str = ""


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Wait for changes after ``index``, at most ``wait_ms``."""

    index: int
    wait_ms: int


class KeyChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: str
    after: Versioned | None


class WatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The changes up to ``index``, in order: one list per command. ``too_old``: take a snapshot instead."""

    index: int
    too_old: bool = False
    changes: list[list[KeyChange]] = []


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the snapshot that the node made at ``index`` (0: a new or a recent one), from ``position`` on."""

    index: int = 0
    position: int = 0


class SnapshotAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``index`` is 0 if the node no longer has the snapshot: start again."""

    index: int
    total_bytes: int = 0
    content: bytes = b""


class RenewRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``load``: a broker's load report, every few seconds."""

    session_ids: list[int]
    load: BrokerLoad | None = None


class RenewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions that are alive, with a full lease again; all others have ended."""

    alive: list[int]


class LoadsRequest(msgspec.Struct, frozen=True, kw_only=True):
    pass


class LoadsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Brokers' load reports of the last half minute."""

    loads: list[BrokerLoad]


class ForwardRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to pass to the leader, and its ``hops`` so far. The answer is the leader's."""

    method: int
    body: bytes
    timeout_ms: int
    hops: int = 0


class DigestsRequest(msgspec.Struct, frozen=True, kw_only=True):
    pass


class DigestsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``marks``: (index, digest of the state after that entry), ascending. ``schema``: nodes compare only if it is the same."""

    schema: int
    marks: list[tuple[int, bytes]]


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True):
    pass


class HelloRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a node for its identity; the sender gives its own (node id 0: a client)."""

    node_id: int = 0
    identity: str = ""
    address: str = ""


class HelloAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``peers`` are the node ids in the node's configuration; ``members`` is empty while it belongs to no quorum.

    ``leads``: it leads, and no other node can lead now.
    """

    node_id: int
    identity: str
    cluster_id: str
    peers: list[int]
    members: tuple[Member, ...] = ()
    members_index: int = 0
    leads: bool = False


class ChangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """With ``address``: add the node ``node_id`` that answers there. Without: remove the node."""

    node_id: int
    address: str = ""


class ChangeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The change is committed at ``index``."""

    index: int


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``match_index`` and ``contact_ms`` (since its last answer) are -1 if the answering node does not know them."""

    node_id: int
    identity: str
    address: str
    voter: bool
    match_index: int = -1
    contact_ms: int = -1


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``status`` and ``doctor``. ``leader`` is a node id, 0 if none is known.

    ``refused_messages``: messages of other nodes since the start that no correct peer sends.
    """

    node_id: int
    cluster_id: str
    role: str
    term: int
    leader: int
    leader_address: str
    commit_index: int
    applied_index: int
    log_first_index: int
    log_last_index: int
    log_bytes: int
    records: int
    sessions: int
    members: list[MemberStatus] = []
    members_index: int = 0
    refused_messages: int = 0


class WatchAnswerParts(msgspec.Struct, frozen=True, kw_only=True):
    """A ``WatchAnswer`` as a node sends it: each command's changes are encoded once for all watchers."""

    index: int
    too_old: bool = False
    changes: list[msgspec.Raw] = []


_encoder = msgspec.msgpack.Encoder()


def encode(body: msgspec.Struct) -> bytes:
    return _encoder.encode(body)


def decode(body: Buffer, kind: type[Body]) -> Body:
    """Decode a body. Raises ``Invalid``."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except MALFORMED as malformed:
        raise Invalid(f"malformed {kind.__name__}: {malformed}") from malformed


def wire_error(error: StratalogError) -> WireError:
    return WireError(error.code, error.message, error.detail)


def raised_error(error: WireError) -> StratalogError:
    return error_from_wire(error.code, error.message, error.detail)
