"""One node of the metadata quorum: recovery, listening, stopping. What it does in between is in ``serving.py``.

After a failure of its disk a node serves nothing any more; ``failure`` says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from stratalog_core.errors import Invalid, StorageFailed, StratalogError, Unavailable
from stratalog_core.ports import Background, Clock, Files, Listener, Random, Request, Transport
from stratalog_metadata import identity
from stratalog_metadata.config import MetadataSettings
from stratalog_metadata.identity import Identity
from stratalog_metadata.node import RaftNode
from stratalog_metadata.peers import Peers
from stratalog_metadata.raft import Membership, Raft
from stratalog_metadata.replica import Replica
from stratalog_metadata.serving import ServingNode
from stratalog_metadata.storage import NodeStorage
from stratalog_metadata.store import SQLITE_FILE, SqliteStore, StateStore

HAND_OVER_TIMEOUT_S: Final = 0.5
_log = logging.getLogger(__name__)


class MetadataServer:
    """``files`` is rooted at ``settings.data_dir``; ``background`` needs two threads to overlap log and store.

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
        self._listener: Listener | None = None
        self._failure: StratalogError | None = None
        self._identity: Identity | None = None
        self._peers: Peers | None = None
        self._core: Raft | None = None
        self._serving: ServingNode | None = None
        self._node: RaftNode | None = None
        self._remembering: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """``host:port`` that is listened on."""
        assert self._listener is not None, "bind() or start() comes first"
        return self._listener.address

    @property
    def is_leader(self) -> bool:
        """Whether this node leads and has applied everything that was ever committed."""
        return self._serving is not None and self._serving.is_leader

    @property
    def failure(self) -> StratalogError | None:
        """Why the node serves nothing any more; None while it does."""
        return self._failure

    async def bind(self) -> None:
        """Listen, so that ``address`` is known; requests are refused until ``start``."""
        if self._listener is None:
            self._listener = await self._transport.serve(self._settings.listen, self._handle)

    async def start(self, peers: Mapping[int, str] | None = None) -> None:
        """Recover and take part. ``peers`` overrides the settings' with addresses that were learnt after binding.

        Raises ``Invalid`` (another node's or cluster's directory), ``Corrupt`` or ``StorageFailed``.
        """
        await self.bind()
        addresses = dict(peers if peers is not None else self._settings.peer_addresses())
        addresses.setdefault(self._settings.node_id, self.address)
        self._identity = await self._background.run(self._claim)
        storage = await self._background.run(self._open_storage)
        peers_border = Peers(addresses, self._transport, self._peer_lost)
        peers_border.cluster_id = self._identity.cluster_id
        self._peers = peers_border
        self._begin(storage, Membership.of_voters(addresses), peers_border)

    def _claim(self) -> Identity:
        return identity.claim(self._files, self._settings.node_id, self._settings.cluster_id)

    def _open_storage(self) -> NodeStorage:
        store = self._store
        if store is None:
            store = SqliteStore(Path(self._settings.data_dir) / SQLITE_FILE)
        return NodeStorage(self._files, store, self._settings.log_segment_bytes)

    def _begin(self, storage: NodeStorage, membership: Membership, peers: Peers) -> None:
        settings, recovered = self._settings, storage.recovered
        core = Raft(
            settings.raft(),
            membership,
            hard_state=recovered.hard_state,
            log=recovered.tail,
            applied=recovered.image.index,
            random=self._random,
            now=self._clock.monotonic(),
        )
        replica = Replica(recovered.image)
        serving = ServingNode(
            settings,
            core,
            replica,
            peers,
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
        self._core, self._serving, self._node = core, serving, node
        node.start()

    async def close(self, *, hand_over: bool = True) -> None:
        """Stop. ``hand_over``: let another node take the lead first, and leave the store up to date."""
        if hand_over:
            await self._hand_over()
        self._stop(Unavailable("this metadata node is closing"))
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        if self._node is not None:
            node, self._node = self._node, None
            await node.close(save=hand_over)
        await asyncio.gather(*self._remembering)

    async def _hand_over(self) -> None:
        if self._core is None or self._serving is None or self._node is None or not self._core.transfer_leadership():
            return
        self._node.wake()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._serving.until_led(), HAND_OVER_TIMEOUT_S)

    def _stop(self, reason: StratalogError) -> None:
        self._failure = self._failure or reason
        if self._serving is not None:
            self._serving.stop(Unavailable(f"this metadata node has stopped: {reason.message}"))

    def _handle(self, request: Request) -> None:
        try:
            if self._failure is not None:
                # To a client it is one node that is away: the others may serve it.
                raise Unavailable(f"this metadata node has stopped: {self._failure.message}")
            if self._serving is None:
                raise Unavailable("this metadata node is starting")
            self._serving.handle(request)
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
        node_id = self._settings.node_id
        self._identity = Identity(node_id=node_id, cluster_id=cluster_id)
        try:
            await self._background.run(lambda: identity.remember(self._files, node_id, cluster_id))
        except OSError as failure:
            self._failed(failure)
