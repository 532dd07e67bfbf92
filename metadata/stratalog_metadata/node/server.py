"""One metadata node from start to stop: recovery, founding or joining, listening. ``serving.py`` answers requests.

After a disk failure a node serves nothing; ``failure`` gives the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from stratalog_core.errors import Invalid, StorageFailed, StratalogError, Unavailable
from stratalog_core.metrics.groups import MetricGroup
from stratalog_core.ports import Background, Bound, Clock, Files, Listener, Random, Request, Transport
from stratalog_core.restarting import restarting
from stratalog_metadata.node import joining
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.joining import Begin, Wait
from stratalog_metadata.node.peer_discovery import PeerDiscovery
from stratalog_metadata.node.peers import Peers
from stratalog_metadata.node.raft_node import RaftNode
from stratalog_metadata.node.serving import ServingNode
from stratalog_metadata.protocol import messages
from stratalog_metadata.raft import Membership, Raft
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.storage import identity
from stratalog_metadata.storage.identity import Identity
from stratalog_metadata.storage.node_storage import LOG_DIRECTORY, NodeStorage
from stratalog_metadata.storage.raft_log import DurableLog
from stratalog_metadata.storage.state_store import SQLITE_FILE, SqliteStore, StateStore

HAND_OVER_TIMEOUT_S: Final = 0.5
_log = logging.getLogger(__name__)


class MetadataServer:
    """``files`` is rooted at ``settings.data_dir``; ``background`` needs two threads so that log and store overlap.

    ``store`` defaults to SQLite in the data directory.
    """

    def __init__(
        self,
        settings: MetadataSettings,
        transport: Transport,
        files: Files,
        clock: Clock,
        random: Random,
        background: Background,
        store: StateStore | None = None,
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._files = files
        self._clock = clock
        self._random = random
        self._background = background
        self._store = store
        self._bound: Bound | None = None
        self._listener: Listener | None = None
        self._failure: StratalogError | None = None
        self._addresses: dict[int, str] = {}
        self._identity: Identity | None = None
        self._peers: Peers | None = None
        self._core: Raft | None = None
        self._serving: ServingNode | None = None
        self._node: RaftNode | None = None
        self._takes_part = asyncio.Event()
        self._joining: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._remembering: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """The address it listens on, ``host:port``."""
        assert self._bound is not None, "bind() or start() comes first"
        return self._bound.address

    @property
    def is_leader(self) -> bool:
        """Whether this node leads and has applied every committed entry."""
        return self._serving is not None and self._serving.is_leader

    @property
    def failure(self) -> StratalogError | None:
        """Why the node has stopped serving; None while it serves."""
        return self._failure

    def metrics(self) -> Iterator[MetricGroup]:
        """For a scrape; nothing before the node takes part in a quorum."""
        if self._serving is not None and self._node is not None:
            yield from self._serving.metrics(self._node)

    async def bind(self) -> None:
        """Bind the port, so that ``address`` is known; connections are accepted after ``start``. Raises ``Conflict``."""
        if self._bound is None:
            self._bound = await self._transport.bind(self._settings.listen)

    async def start(self, peers: Mapping[int, str] | None = None) -> None:
        """Recover, join the quorum and listen. With an empty directory, listen and discover the quorum (``joining.py``). The
        caller has locked the directory.

        ``peers`` replaces the settings' addresses with ones that were learnt after binding. Raises ``Conflict`` (the port is
        in use), ``Invalid`` (the directory belongs to another node or cluster), ``Fenced`` (removed from the quorum),
        ``Corrupt`` or ``StorageFailed``.
        """
        await self.bind()
        assert self._bound is not None, "the port has just been bound"
        try:
            await self._recover(peers)
            self._listener = await self._bound.listen(self._handle)
        except BaseException:
            self._bound.close()
            raise

    async def _recover(self, peers: Mapping[int, str] | None) -> None:
        self._addresses = dict(peers if peers is not None else self._settings.peer_addresses())
        self._addresses.setdefault(self._settings.node_id, self.address)
        own = await self._background.run(self._claim)
        if own.members:
            await self._take_part(own)
        elif len(self._addresses) == 1:
            await self._found_or_join(own, joining.decide(own, self._addresses, {}))
        else:
            self._identity = own
            self._joining = asyncio.get_running_loop().create_task(self._join(own))

    def _claim(self) -> Identity:
        return identity.claim(self._files, self._settings.node_id, self._settings.cluster_id, self._random)

    async def _join(self, own: Identity) -> None:
        seeker = PeerDiscovery(own, self._addresses, self._transport)
        try:
            await self._found_or_join(own, await seeker.until_begin())
        except (StratalogError, OSError) as failure:
            _log.critical("metadata node %d does not start: %s", own.node_id, failure)
            self._failed(failure)

    async def _found_or_join(self, own: Identity, begin: Begin | Wait) -> None:
        assert isinstance(begin, Begin)
        joined = msgspec.structs.replace(own, members=begin.members, members_index=begin.index)
        await self._background.run(lambda: DurableLog.create(self._files, LOG_DIRECTORY))
        await self._background.run(lambda: identity.remember(self._files, joined))
        await self._take_part(joined)

    async def _take_part(self, own: Identity) -> None:
        storage = await self._background.run(self._open_storage)
        image = storage.recovered.image
        removed = identity.removed(own, Replica(image).quorum())
        if removed is not None:
            await self._background.run(storage.close)
            raise removed
        self._identity = own
        self._peers = Peers(own, self._addresses, self._transport, self._peer_lost, self._failed)
        self._begin(storage, own, self._peers)

    def _open_storage(self) -> NodeStorage:
        store = self._store
        if store is None:
            store = SqliteStore(Path(self._settings.data_dir) / SQLITE_FILE)
        return NodeStorage(self._files, store, self._settings.log_segment_bytes, must_exist=True)

    def _begin(self, storage: NodeStorage, own: Identity, peers: Peers) -> None:
        settings, recovered = self._settings, storage.recovered
        replica = Replica(recovered.image)
        applied = replica.quorum()
        core = Raft(
            settings.raft(own.identity),
            Membership.of(applied[1].members if applied is not None else own.members),
            hard_state=recovered.hard_state,
            log=recovered.tail,
            applied=recovered.image.index,
            random=self._random,
            now=self._clock.monotonic(),
            membership_index=applied[0] if applied is not None else 0,
        )
        serving = ServingNode(
            settings,
            core,
            replica,
            peers,
            own,
            transport=self._transport,
            clock=self._clock,
            random=self._random,
            on_cluster=self._learnt_cluster,
            on_failed=self._failed,
        )
        node = RaftNode(
            core,
            replica,
            storage,
            clock=self._clock,
            background=self._background,
            events=serving,
            snapshot_entries=settings.snapshot_entries,
            snapshot_bytes=settings.snapshot_bytes,
            kept_entries=settings.kept_entries,
        )
        serving.attach(node)
        self._comparing = asyncio.get_running_loop().create_task(restarting(serving.comparer.run, "the comparison of digests"))
        self._core, self._serving, self._node = core, serving, node
        node.start()
        self._takes_part.set()

    async def until_takes_part(self) -> None:
        """Wait until the node belongs to a quorum and is recovered. Raises the permanent reason if it never will."""
        await self._takes_part.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self, *, hand_over: bool = True) -> None:
        """Stop. ``hand_over``: transfer leadership first, and bring the store up to date."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        if hand_over:
            await self._hand_over()
        self._stop(Unavailable("this metadata node is closing"))
        if self._listener is not None:
            await self._listener.close()
        if self._bound is not None:
            self._bound.close()
        if self._node is not None:
            node, self._node = self._node, None
            await node.close(save=hand_over)
        await asyncio.gather(*self._remembering)

    async def _hand_over(self) -> None:
        if self._failure is not None or self._core is None or self._serving is None or self._node is None:
            return
        if not self._core.transfer_leadership():
            return
        self._node.wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
                await self._serving.until_led()

    def _stop(self, reason: StratalogError) -> None:
        self._failure = self._failure or reason
        if self._comparing is not None:
            self._comparing.cancel()
        self._takes_part.set()
        if self._serving is not None:
            self._serving.stop(Unavailable(f"this metadata node has stopped: {reason.message}"))

    def _handle(self, request: Request) -> None:
        try:
            if self._failure is not None:
                # For the client this node is unavailable; others may serve it.
                raise Unavailable(f"this metadata node has stopped: {self._failure.message}")
            if self._serving is not None:
                self._serving.handle(request)
            elif request.method == messages.HELLO and self._identity is not None:
                request.reply(messages.encode(joining.introduction(self._identity, self._addresses)))
            else:
                raise Unavailable("this metadata node is starting, or waits to be added to the quorum; its log says which")
        except StratalogError as refused:
            request.fail(refused)

    def _peer_lost(self, node_id: int) -> None:
        if self._serving is not None and self._failure is None:
            self._serving.peer_lost(node_id)

    def _failed(self, failure: BaseException) -> None:
        error = failure if isinstance(failure, StratalogError) else StorageFailed(f"this metadata node has stopped: {failure}")
        self._stop(error)

    def _learnt_cluster(self, cluster_id: str) -> None:
        assert self._identity is not None
        assert self._peers is not None
        if self._identity.cluster_id == cluster_id:
            return
        if self._identity.cluster_id:
            raise Invalid(f"this node's data is of cluster {self._identity.cluster_id}, but its peers are of {cluster_id}")
        self._peers.cluster_id = cluster_id
        task = asyncio.get_running_loop().create_task(self._remember_cluster(cluster_id))
        self._remembering.add(task)
        task.add_done_callback(self._remembering.discard)

    async def _remember_cluster(self, cluster_id: str) -> None:
        assert self._identity is not None
        known = self._identity = msgspec.structs.replace(self._identity, cluster_id=cluster_id)
        try:
            await self._background.run(lambda: identity.remember(self._files, known))
        except OSError as failure:
            self._failed(failure)
