"""Every port that listens, by real servers behind real sockets: the broker's, the metadata node's, the bookie's.

The first byte of an input says what kind of client it is (``MANNERS``), the rest is what it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final

from support.embedded_quorum import EmbeddedQuorum, embedded_quorum
from unit.broker.mini_cluster import MiniCluster, run_cluster, until_served

from fuzz.kafka_requests import TOPIC, frame, sound_frames
from fuzz.serving import ANSWER_S, Served
from fuzz.target import Target
from fuzz.targets import bookies, metadata
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.node.server import BookieServer
from stratalog_bookies.protocol import messages as bookie_messages
from stratalog_broker.admin.topics import NewTopic
from stratalog_core.connections import framing
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.protocol import messages as metadata_messages
from stratalog_metadata.records import LEDGER_IDS, Counter, Topic
from stratalog_metadata.state.commands import Command, Put

FRAMED, RAW, SLOW, RUDE, TWICE = range(5)
"""A whole frame with its length; bytes as they are; a frame in two halves; one closed at once; two frames at once."""
MANNERS: Final = 5
HALF_BYTES: Final = 7
API_VERSIONS: Final = frame(18, 0, b"")


async def visit(address: str, content: bytes, framed: Callable[[bytes], bytes]) -> None:
    """One client's life: connect, send, wait a moment for an answer, go."""
    manner, said = (content[0] % MANNERS, content[1:]) if content else (RAW, b"")
    whole = said if manner == RAW else framed(said)
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(ConnectionError):
        if manner == SLOW:
            writer.write(whole[:HALF_BYTES])
            await asyncio.sleep(0)
            whole = whole[HALF_BYTES:]
        writer.write(whole * 2 if manner == TWICE else whole)
        if manner == RAW:
            writer.write_eof()
        if manner != RUDE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await reader.read(4096)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


# -- the broker's port


class KafkaPort:
    """A broker of a whole cluster, with one topic that requests name."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._cluster = cluster

    async def attack(self, content: bytes) -> None:
        await visit(self._cluster.broker.kafka_address, content, lambda said: struct.pack(">i", len(said)) + said)

    async def check(self) -> None:
        host, port = self._cluster.broker.kafka_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(struct.pack(">i", len(API_VERSIONS)) + API_VERSIONS)
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        await reader.readexactly(size)
        writer.close()
        await writer.wait_closed()

    @property
    def is_worn(self) -> bool:
        topics = list(self._cluster.metadata.view.all(Topic))
        return len(topics) > 40 or sum(topic.partition_count for topic in topics) > 400


@asynccontextmanager
async def kafka_port(directory: Path) -> AsyncIterator[KafkaPort]:
    async with run_cluster(directory, auto_create_topics=False, lease_ms=60_000) as cluster:
        broker = cluster.broker
        if not any(topic.name == TOPIC for topic in broker.metadata.view.all(Topic)):
            await broker.topic_commands.create(NewTopic(name=TOPIC, partition_count=2), 20.0)
        topic = next(topic for topic in broker.metadata.view.all(Topic) if topic.name == TOPIC)
        await until_served(cluster.broker, topic.topic_id)
        yield KafkaPort(cluster)


# -- ports of our own protocol


METHODS = 32
"""How far the methods of one server's range go that are tried, made-up ones among them."""


def request_frame(said: bytes, first_method: int) -> bytes:
    """The first byte is the method, counted from the first one of the server's."""
    method, body = (said[0], said[1:]) if said else (0, b"")
    return framing.pack_header(framing.REQUEST, first_method + method % METHODS, 7, len(body)) + body


class MetadataPort:
    def __init__(self, quorum: EmbeddedQuorum) -> None:
        self._quorum = quorum

    async def attack(self, content: bytes) -> None:
        await visit(self._quorum.server.address, content, lambda said: request_frame(said, metadata_messages.PROPOSE))

    async def check(self) -> None:
        assert self._quorum.server.failure is None, f"the node gave up: {self._quorum.server.failure}"
        await self._quorum.client.read(["cluster/"])

    @property
    def is_worn(self) -> bool:
        return False


@asynccontextmanager
async def metadata_port(directory: Path) -> AsyncIterator[MetadataPort]:
    transport = TcpTransport()
    try:
        async with embedded_quorum(directory / "metadata", transport) as quorum:
            yield MetadataPort(quorum)
    finally:
        await transport.close()


class BookiePort:
    def __init__(self, server: BookieServer, transport: TcpTransport) -> None:
        self._address = server.address
        self._transport = transport
        self._next_entry = 0

    async def attack(self, content: bytes) -> None:
        await visit(self._address, content, lambda said: request_frame(said, bookie_messages.ADD))

    async def check(self) -> None:
        body = await self._transport.channel(self._address).call(bookie_messages.INFO, (), 20.0)
        info = bookie_messages.decode(bookie_messages.BookieInfo, body)
        assert [disk.state for disk in info.disks] == ["writable"], f"a disk was given up: {info}"

    @property
    def is_worn(self) -> bool:
        return False


@asynccontextmanager
async def bookie_port(directory: Path) -> AsyncIterator[BookiePort]:
    transport = TcpTransport()
    disk = directory / "disk"
    settings = BookieSettings(
        bookie_id="b",
        data_dirs=(str(disk),),
        log_file_bytes=128 * 1024,
        spare_files=0,
        free_bytes_min=0,
        collect_interval_s=3600,
    )
    background = ThreadBackground(settings.threads, "fuzzed")
    try:
        async with embedded_quorum(directory / "metadata", transport) as quorum:
            # Clients make ledgers up, with ids that metadata has not handed out.
            all_given = Counter(name=LEDGER_IDS, next_value=2**63 - 1)
            await quorum.client.propose(Command(updates=(Put(record=all_given),)))
            server = BookieServer(settings, quorum.client, transport, [SystemFiles(disk)], SystemClock(), Random(1), background)
            await server.start()
            try:
                yield BookiePort(server, transport)
            finally:
                await server.close()
    finally:
        await transport.close()
        background.close()


# -- what is sent


def kafka_clients() -> list[bytes]:
    """Every version of every API, each in one of the manners."""
    return [
        bytes((number % MANNERS if number % MANNERS != RAW else FRAMED,)) + one for number, one in enumerate(sound_frames())
    ]


def metadata_clients() -> list[bytes]:
    commands = metadata.golden("command")
    bodies = {
        metadata_messages.PROPOSE: metadata_messages.encode(metadata_messages.ProposeRequest(commands=commands)),
        metadata_messages.RAFT: metadata.raft_envelope(),
        metadata_messages.READ: metadata_messages.encode(metadata_messages.ReadRequest(keys=["topic/a"])),
        metadata_messages.SCAN: metadata_messages.encode(metadata_messages.ScanRequest(prefix="")),
        metadata_messages.WATCH: metadata_messages.encode(metadata_messages.WatchRequest(index=0, wait_ms=10)),
        metadata_messages.SNAPSHOT: metadata_messages.encode(metadata_messages.SnapshotRequest()),
        metadata_messages.RENEW: metadata_messages.encode(metadata_messages.RenewRequest(session_ids=[1])),
        metadata_messages.STATUS: metadata_messages.encode(metadata_messages.StatusRequest()),
        metadata_messages.HELLO: metadata_messages.encode(metadata_messages.HelloRequest()),
        metadata_messages.LOADS: metadata_messages.encode(metadata_messages.LoadsRequest()),
        metadata_messages.FORWARD: metadata_messages.encode(metadata.FORWARDED),
    }
    return [bytes((FRAMED, method - metadata_messages.PROPOSE)) + body for method, body in bodies.items()]


def bookie_clients() -> list[bytes]:
    bodies = {
        bookie_messages.ADD: bookies.DECODERS[0][1],
        bookie_messages.READ: bookies.DECODERS[2][1],
        bookie_messages.READ_HEADERS: bookies.DECODERS[3][1],
        bookie_messages.FENCE: bookie_messages.encode(bookie_messages.LedgerIds(ledger_ids=(7, 9))),
        bookie_messages.LAC: bookie_messages.encode(bookie_messages.LedgerIds(ledger_ids=(7, 9))),
        bookie_messages.WRITE_LAC: bookie_messages.encode(bookie_messages.ExplicitLacs(lacs=((7, 1), (11, 5)))),
        bookie_messages.DELETE: bookie_messages.encode(bookie_messages.LedgerIds(ledger_ids=(9,))),
        bookie_messages.LIST: bookie_messages.encode(bookie_messages.ListLedgers()),
        bookie_messages.INFO: b"",
    }
    return [bytes((FRAMED, method - bookie_messages.ADD)) + body for method, body in bodies.items()]


KAFKA, METADATA, BOOKIE = Served(kafka_port), Served(metadata_port), Served(bookie_port)
CLOSE: Final[dict[str, Callable[[], None]]] = {
    "kafka-port": KAFKA.close, "metadata-port": METADATA.close, "bookie-port": BOOKIE.close
}  # fmt: skip
"""Stops a target's server and checks what it leaves."""

TARGETS = (
    Target(name="kafka-port", run=KAFKA.run, seeds=kafka_clients),
    Target(name="metadata-port", run=METADATA.run, seeds=metadata_clients),
    Target(name="bookie-port", run=BOOKIE.run, seeds=bookie_clients),
)
