"""A cluster of real bookies for tests: an embedded quorum, bookies that audit, and one client, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from uuid import UUID

import msgspec
from support.embedded_quorum import embedded_quorum

from stratalog_bookies.client import LedgerClient, LedgerClientSettings, LedgerSpec, LedgerWriter
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.node.server import BookieServer
from stratalog_bookies.protocol import messages
from stratalog_bookies.repair.core.shares import share_of
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Files
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import CLUSTER_KEY, Bookie, Ledger, bookie_key, ledger_key
from stratalog_metadata.state.commands import Command, Put, Update

NEVER_MS = 3_600_000
"""For what no test waits for: a stall must not look like a failed bookie, and broken connections tell at once."""
SETTINGS = LedgerClientSettings(
    tick_ms=20, bookie_silence_ms=NEVER_MS, bookie_avoid_ms=100, hedge_delay_ms=100, confirm_deadline_ms=NEVER_MS,
    request_timeout_ms=60_000, read_deadline_ms=60_000, recovery_deadline_ms=60_000,
)  # fmt: skip
ENTRIES = 40


class Silent:
    """A listener that ignores everything."""

    def on_first_copy(self, entry_id: int) -> None: ...
    def on_confirmed(self, lac: int) -> None: ...
    def on_failed(self, error: StratalogError) -> None: ...


async def started_bookie(
    settings: BookieSettings, metadata: MetadataClient, transport: TcpTransport, disks: Sequence[Files] = ()
) -> tuple[BookieServer, ThreadBackground]:
    """Start a real bookie on its directories, with threads of its own."""
    background = ThreadBackground(settings.threads, settings.bookie_id)
    disks = disks or [SystemFiles(Path(each)) for each in settings.data_dirs]
    server = BookieServer(settings, metadata, transport, disks, SystemClock(), Random(1), background)
    await server.start()
    return server, background


@dataclass
class Cluster:
    """A quorum, bookies that audit, and one client."""

    path: Path
    metadata: MetadataClient
    transport: TcpTransport
    client: LedgerClient
    audit_bytes_per_s: int = 256 * 1024 * 1024
    bookies: dict[str, tuple[BookieServer, ThreadBackground]] = field(default_factory=dict)

    async def start_bookie(
        self, name: str, rack: str = "", audit_delay_s: float = 0.3, disks: Sequence[Files] = (), **changes: object
    ) -> None:
        directory = self.path / name
        settings = BookieSettings(
            bookie_id=name, data_dirs=(str(directory),), rack=rack, log_file_bytes=4 * 1024 * 1024, spare_files=0,
            free_bytes_min=0, scrub_bytes_per_s=0, audit_delay_s=audit_delay_s, audit_interval_s=0.05,
            audit_bytes_per_s=self.audit_bytes_per_s, lease_ms=60_000,
        )  # fmt: skip
        settings = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
        self.bookies[name] = await started_bookie(settings, self.metadata, self.transport, disks)

    async def stop_bookie(self, name: str) -> None:
        server, background = self.bookies.pop(name)
        await server.close()
        background.close()

    async def write(self, ensemble_size: int = 3, write_quorum: int = 3, entries: int = ENTRIES) -> LedgerWriter:
        spec = LedgerSpec(
            topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, ensemble_size=ensemble_size,
            write_quorum=write_quorum, ack_quorum=min(2, write_quorum),
        )  # fmt: skip
        writer = await self.client.create(spec, updates=_no_updates, listener=Silent())
        for number in range(entries):
            writer.append(batch(number))
        return writer

    async def sealed(self, ensemble_size: int = 3, write_quorum: int = 3, entries: int = ENTRIES) -> Ledger:
        """Write and close a ledger of which every bookie has its copies: two of three are enough to seal one."""
        writer = await self.write(ensemble_size, write_quorum, entries)
        ledger = await writer.seal(entries)
        await eventually(lambda: writer.unconfirmed_bytes == 0)
        return ledger

    def stored(self, ledger_id: int) -> Ledger:
        found = self.metadata.view.find(Ledger, ledger_key(ledger_id))
        assert found is not None
        return found

    def named(self, ledger_id: int) -> set[str]:
        return {name for fragment in self.stored(ledger_id).fragments for name in fragment.bookies}

    async def missing(self, ledger: Ledger) -> int:
        """Copies that the record names and the bookies lack, according to each bookie."""
        return sum([len(entries) for entries in (await self.gaps(ledger)).values()])

    async def gaps(self, ledger: Ledger) -> dict[tuple[int, str], list[int]]:
        lacking: dict[tuple[int, str], list[int]] = {}
        for number, fragment in enumerate(ledger.fragments):
            for position, name in enumerate(fragment.bookies):
                share = share_of(ledger, number, position)
                (answer,) = await self.client._requests.held(name, messages.Range(ledger.ledger_id, 0, 1000))
                held = {entry.entry_id for entry in answer.entries}
                lacking[number, name] = [entry_id for entry_id in share.within(0, 1000) if entry_id not in held]
        return {place: entries for place, entries in lacking.items() if entries}

    async def read_back(self, ledger_id: int) -> list[bytes]:
        ledger, payloads = self.stored(ledger_id), list[bytes]()
        while len(payloads) <= ledger.last_entry:
            found = await self.client.read(ledger, len(payloads), ledger.last_entry, 1 << 20)
            payloads += [bytes(entry.payload) for entry in found]
        return payloads

    async def drain(self, name: str) -> None:
        found = self.metadata.view.get(bookie_key(name))
        assert found is not None
        assert isinstance(found.record, Bookie)
        await self.metadata.propose(Command(updates=(Put(record=msgspec.structs.replace(found.record, draining=True)),)))

    async def close(self) -> None:
        await self.client.close()
        for name in list(self.bookies):
            await self.stop_bookie(name)


def _no_updates(ledger: Ledger) -> tuple[Update, ...]:
    return ()


def batch(offset: int) -> bytes:
    return bytes(build_batch([Record(offset=offset, timestamp_ms=1, key=None, value=b"value" * 100)]))


PAYLOADS = [batch(number) for number in range(ENTRIES)]


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nothing signals."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


@asynccontextmanager
async def run_cluster(path: Path) -> AsyncIterator[Cluster]:
    """A quorum and a client; each test starts the bookies that it needs."""
    async with AsyncExitStack() as stack:
        transport = TcpTransport()
        stack.push_async_callback(transport.close)
        quorum = await stack.enter_async_context(embedded_quorum(path / "metadata", transport))
        await eventually(lambda: quorum.client.view.get(CLUSTER_KEY) is not None)
        client = LedgerClient(quorum.client, transport, SystemClock(), Random(7), SETTINGS)
        made = Cluster(path=path, metadata=quorum.client, transport=transport, client=client)
        stack.push_async_callback(made.close)
        yield made
