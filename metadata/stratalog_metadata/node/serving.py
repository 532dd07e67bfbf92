"""A recovered node in operation: answers requests and connects the Raft node with the parts that depend on it.

The leader handles proposals, linearizable reads and renewals. Every node that is in touch with the leader serves watches and
snapshots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from stratalog_core.errors import Invalid, NotLeader, StratalogError, Unavailable
from stratalog_core.malformed import MALFORMED
from stratalog_core.metrics.groups import MetricGroup
from stratalog_core.ports import Clock, Random, Request, Transport
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.digest_comparison import DigestComparer
from stratalog_metadata.node.forwarding import FORWARDED, ForwardedRequest, Forwarder
from stratalog_metadata.node.leadership import Leadership
from stratalog_metadata.node.linearizable_reads import LinearizableReads
from stratalog_metadata.node.membership_service import MembershipService
from stratalog_metadata.node.metrics import QuorumMetrics, RecordMetrics, RequestCounters
from stratalog_metadata.node.peers import Peers, decode_messages
from stratalog_metadata.node.pending_proposals import OnAnswers, PendingProposals
from stratalog_metadata.node.raft_node import RaftNode
from stratalog_metadata.node.read_requests import Answers
from stratalog_metadata.node.recent_changes import RecentChanges
from stratalog_metadata.node.watchers import Watchers
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.broker_loads import HEAVIEST_MAX
from stratalog_metadata.protocol.messages import CommandAnswer
from stratalog_metadata.raft import Entry, EntryKind, Membership, Message, Raft
from stratalog_metadata.records import CLUSTER_KEY, Cluster
from stratalog_metadata.state.commands import Command
from stratalog_metadata.state.machine import COMMAND_UPDATES_MAX, Outcome
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage import identity
from stratalog_metadata.storage.identity import Identity

_encode_command = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode


class ServingNode:
    """``on_cluster`` is called when the cluster's record has been applied, ``on_failed`` when the node must stop."""

    def __init__(
        self,
        settings: MetadataSettings,
        core: Raft,
        replica: Replica,
        peers: Peers,
        own: Identity,
        *,
        transport: Transport,
        clock: Clock,
        random: Random,
        on_cluster: Callable[[str], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._core = core
        self._replica = replica
        self._peers = peers
        self._identity = own
        self._members = MembershipService(core, peers, own, transport, clock, self._append_members)
        self._clock = clock
        self._random = random
        self._on_cluster = on_cluster
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._recent = RecentChanges(replica.index, settings.watch_entries, settings.watch_bytes)
        self._watchers = Watchers(self._recent)
        self._reads = LinearizableReads(core)
        self._answers = Answers(replica, self._recent)
        self._forwarder = Forwarder(core, peers, transport)
        self.comparer = DigestComparer(core.node_id, replica.digest, transport, self._other_voters, on_failed)
        self._proposals = PendingProposals()
        self._counters = RequestCounters()
        self._leadership: Leadership | None = None
        self._led_term = 0
        self._not_leading = asyncio.Event()
        self._giving_up: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._node: RaftNode | None = None
        self._handlers: Final[Mapping[int, Callable[[Request], None]]] = {
            messages.PROPOSE: self._on_propose,
            messages.RAFT: self._on_raft,
            messages.READ: lambda request: self._read(request, self._serve_read),
            messages.SCAN: lambda request: self._read(request, self._serve_scan),
            messages.WATCH: self._on_watch,
            messages.SNAPSHOT: self._on_snapshot,
            messages.RENEW: self._on_renew,
            messages.STATUS: self._on_status,
            messages.HELLO: self._members.hello,
            messages.CHANGE_MEMBERS: self._on_change_members,
            messages.LOADS: self._on_loads,
            messages.FORWARD: self._on_forward,
            messages.DIGESTS: lambda request: request.reply(messages.encode(self.comparer.answer())),
        }

    def _other_voters(self) -> list[str]:
        """Addresses of the other voters; empty where unknown."""
        return [self._peers.address(node_id) for node_id in self._core.membership.other_voters(self._core.node_id)]

    def attach(self, node: RaftNode) -> None:
        """Attach the Raft node, which must be woken whenever the core is given something."""
        self._node = node

    @property
    def is_leader(self) -> bool:
        """Whether this node leads and has applied every committed entry."""
        return self._leadership is not None

    async def until_led(self) -> None:
        """Wait until this node does not lead."""
        await self._not_leading.wait()

    def metrics(self, node: RaftNode) -> Iterator[MetricGroup]:
        """For a scrape. ``node`` drives the core."""
        core, applied = self._core, self._replica.index
        yield self._counters
        yield QuorumMetrics(
            is_leader=int(self.is_leader),
            term=core.term,
            commit_index=core.commit,
            applied_index=applied,
            apply_lag_entries=max(0, core.commit - applied),
            log_entries=len(core.log),
            log_size_bytes=core.log.payload_bytes,
            log_write_seconds=node.log_write_seconds,
            pending_proposals=len(self._proposals),
            waiting_reads=len(self._reads),
            watchers=len(self._watchers),
            refused_messages=node.refused_messages,
        )
        for kind, count in self._replica.records.counts().items():
            yield RecordMetrics(kind=kind, records=count)

    def peer_lost(self, node_id: int) -> None:
        self._core.unreachable(node_id)
        self._wake()

    def stop(self, reason: StratalogError) -> None:
        """Fail all waiting requests and stop serving. The Raft node stops, too: it would lead on from what may be wrong."""
        if self._node is not None:
            self._node.stop()
        self._end_leadership()
        for timer in (self._giving_up, self._leaving):
            if timer is not None:
                timer.cancel()
        self._proposals.forget()
        self._watchers.close(reason)
        self._reads.close(reason)
        self._forwarder.close(reason)

    def _wake(self) -> None:
        if self._node is not None:
            self._node.wake()

    # --- requests ----------------------------------------------------------------------------------------------------

    def handle(self, request: Request) -> None:
        """Dispatch a request. Raises the error to answer with."""
        # First: after a stall of this process, a request may arrive before the timer that ends the lease or the contact.
        self._core.tick(self._clock.monotonic())
        self._counters.requests += 1
        handler = self._handlers.get(request.method)
        if handler is None:
            raise Invalid(f"method {request.method:#06x} is not a method of metadata nodes")
        handler(request)

    def _on_propose(self, request: Request) -> None:
        commands = messages.decode(request.body, messages.ProposeRequest).commands
        for encoded in commands:
            _check_command(encoded)
        if not 1 <= len(commands) <= messages.PROPOSE_COMMANDS_MAX:
            raise Invalid(f"{len(commands)} commands in one request; the number must be 1..{messages.PROPOSE_COMMANDS_MAX}")

        def answer(answers: Sequence[CommandAnswer]) -> None:
            request.reply(messages.encode(messages.ProposeAnswer(answers=list(answers))))

        self._append(commands, answer)

    def _append(self, commands: Sequence[bytes], on_answers: OnAnswers) -> None:
        try:
            first = self._core.propose(commands)
        except NotLeader as refused:
            raise self._not_leader() from refused
        self._counters.commands_proposed += len(commands)
        self._proposals.add(first, self._core.term, len(commands), on_answers)
        self._wake()

    def _propose_own(self, command: Command, on_answers: OnAnswers) -> None:
        self._append([_encode_command(command)], on_answers)

    def _append_members(self, membership: Membership, on_answers: OnAnswers) -> None:
        try:
            index = self._core.change_members(membership)
        except NotLeader as refused:
            raise self._not_leader() from refused
        self._proposals.add(index, self._core.term, 1, on_answers)
        self._wake()

    def _on_change_members(self, request: Request) -> None:
        if self._leadership is None:
            raise self._not_leader()
        self._members.change(request)

    def _not_leader(self) -> NotLeader:
        leader = 0 if self._core.is_leader else self._core.leader
        return NotLeader(f"metadata node {self._core.node_id} is not the leader", leader=self._peers.address(leader))

    def _on_raft(self, request: Request) -> None:
        envelope = messages.decode(request.body, messages.RaftEnvelope)
        if envelope.cluster_id and self._peers.cluster_id and envelope.cluster_id != self._peers.cluster_id:
            raise Invalid(f"this node belongs to cluster {self._peers.cluster_id}, not to {envelope.cluster_id}")
        arrived = decode_messages(envelope.messages)
        for message in arrived:
            if message.receiver != self._core.node_id:
                raise Invalid(f"this is metadata node {self._core.node_id}: the sender's peers are wrong")
            if message.sender != envelope.node_id:
                raise Invalid(f"messages of other nodes in an envelope of node {envelope.node_id}")
        self._members.check_sender(envelope)
        self._peers.heard(envelope.node_id, envelope.identity, envelope.address)
        if self._node is not None:
            self._node.step(arrived, envelope.identity)
        request.reply()

    def _read(self, request: Request, serve: Callable[[Request], None]) -> None:
        try:
            self._reads.begin(request, serve)
        except NotLeader as refused:
            raise self._not_leader() from refused
        self._wake()

    def _serve_read(self, request: Request) -> None:
        _serve(request, lambda: self._answers.read(messages.decode(request.body, messages.ReadRequest)))

    def _serve_scan(self, request: Request) -> None:
        _serve(request, lambda: self._answers.scan(messages.decode(request.body, messages.ScanRequest)))

    def _on_watch(self, request: Request) -> None:
        self._require_touch()
        self._watchers.watch(request, messages.decode(request.body, messages.WatchRequest))

    def _on_snapshot(self, request: Request) -> None:
        self._require_touch()
        request.reply(self._answers.snapshot(messages.decode(request.body, messages.SnapshotRequest)))

    def _require_touch(self) -> None:
        if not self._core.in_touch:
            raise Unavailable(f"metadata node {self._core.node_id} has no contact with a leader")
        if self._node is not None and self._node.disk_stall.is_stalled:
            raise Unavailable(f"the disk of metadata node {self._core.node_id} completes no write, so its records are old")

    def _on_renew(self, request: Request) -> None:
        if self._leadership is None or not self._core.has_lease:
            # A deposed leader that does not know it must not extend leases.
            raise self._not_leader()
        wanted = messages.decode(request.body, messages.RenewRequest)
        carrier = None if isinstance(request, ForwardedRequest) else request.connection
        alive = self._leadership.renew(wanted.session_ids, carrier)
        if wanted.load is not None and len(wanted.load.heaviest) <= HEAVIEST_MAX:
            self._leadership.report(wanted.load)
        request.reply(messages.encode(messages.RenewAnswer(alive=alive)))

    def _on_forward(self, request: Request) -> None:
        wanted = messages.decode(request.body, messages.ForwardRequest)
        if wanted.method not in FORWARDED:
            raise Invalid(f"method {wanted.method:#06x} is not forwarded to the leader")
        if self._core.is_leader:
            self.handle(ForwardedRequest(request, wanted))
        else:
            self._forwarder.forward(request, wanted)

    def _on_loads(self, request: Request) -> None:
        if self._leadership is None:
            raise self._not_leader()
        request.reply(messages.encode(messages.LoadsAnswer(loads=self._leadership.loads())))

    def _on_status(self, request: Request) -> None:
        core, records = self._core, self._replica.records
        request.reply(
            messages.encode(
                messages.StatusAnswer(
                    node_id=core.node_id,
                    cluster_id=self._peers.cluster_id,
                    role=core.role.value,
                    term=core.term,
                    leader=core.leader,
                    leader_address=self._peers.address(core.leader),
                    commit_index=core.commit,
                    applied_index=self._replica.index,
                    log_first_index=core.log.base_index + 1,
                    log_last_index=core.log.last_index,
                    log_bytes=core.log.payload_bytes,
                    records=len(records),
                    sessions=len(records.of_kind("session")),
                    members=self._members.status(),
                    members_index=core.membership_index,
                    refused_messages=self._node.refused_messages if self._node is not None else 0,
                )
            )
        )

    # --- what the Raft node does -------------------------------------------------------------------------------------

    def send(self, outgoing: Sequence[Message]) -> None:
        self._peers.send(outgoing)

    def applied(self, entry: Entry, outcome: Outcome | None) -> None:
        changes = outcome.changes if outcome is not None else ()
        self._recent.add(entry.index, changes)
        self._proposals.applied(entry.index, entry.term, outcome.result if outcome is not None else None)
        if self._leadership is not None:
            self._leadership.observe(changes)
        if any(change.key == CLUSTER_KEY for change in changes):
            self._learn_cluster()
        if entry.kind is EntryKind.MEMBERS:
            self._check_removed()

    def _check_removed(self) -> None:
        removed = identity.removed(self._identity, self._replica.quorum())
        if removed is not None:
            # Send outstanding promises and the leadership transfer first.
            delay_s = self._settings.election_timeout_ms / 1000
            self._leaving = self._loop.call_later(delay_s, self._on_failed, removed)

    def restored(self, image: StateImage) -> None:
        self._recent.restart(image.index)
        self._proposals.forget(image.index)
        self._learn_cluster()

    def read_ready(self, context: int, index: int) -> None:
        self._reads.ready(context, index)

    def read_lost(self, context: int) -> None:
        self._reads.lost(context)

    def turned(self) -> None:
        self._members.follow()
        self._watchers.tell()
        self._reads.serve_up_to(self._replica.index)
        self._follow_role()
        self._forwarder.follow()
        if self._leadership is not None:
            self._members.tend(is_recorded=self._replica.quorum() is not None)
            self._leadership.drive()

    def failed(self, failure: BaseException) -> None:
        self._on_failed(failure)

    def _learn_cluster(self) -> None:
        stored = self._replica.records.get(CLUSTER_KEY)
        if stored is not None and isinstance(stored.record, Cluster):
            self._on_cluster(stored.record.cluster_id)

    def _follow_role(self) -> None:
        core = self._core
        if core.is_leader:
            if self._led_term != core.term:
                self._end_leadership()
                self._led_term = core.term
                self._not_leading.clear()
            if self._leadership is None and self._replica.index >= core.first_index_of_term:
                self._begin_leadership()
        elif self._led_term:
            self._led_term = 0
            self._not_leading.set()
            self._end_leadership()
            # The next leader decides these entries within a few election timeouts; do not wait longer.
            delay_s = 4 * self._settings.election_timeout_ms / 1000
            self._giving_up = self._loop.call_later(delay_s, self._proposals.forget_before_term, core.term + 1)

    def _begin_leadership(self) -> None:
        self._counters.leaderships += 1
        self._leadership = Leadership(
            self._replica.records,
            self._propose_own,
            self._clock,
            self._random,
            self._settings.cluster_id,
            self._settings.balance(),
        )

    def _end_leadership(self) -> None:
        if self._leadership is not None:
            self._leadership.close()
            self._leadership = None


def _check_command(encoded: bytes) -> None:
    """Raises ``Invalid`` for a command that cannot be decoded: it must never enter the log."""
    if len(encoded) > messages.COMMAND_BYTES_MAX:
        raise Invalid(f"a command has {len(encoded)} bytes; maximum is {messages.COMMAND_BYTES_MAX}: split it")
    try:
        command = _decode_command(encoded)
    except MALFORMED as malformed:
        raise Invalid(f"malformed command: {malformed}") from malformed
    if len(command.updates) + len(command.requirements) > COMMAND_UPDATES_MAX:
        raise Invalid(f"a command has more updates and requirements than the maximum, {COMMAND_UPDATES_MAX}: split it")


def _serve(request: Request, answer: Callable[[], bytes]) -> None:
    """Answer after the request's turn."""
    try:
        request.reply(answer())
    except StratalogError as refused:
        request.fail(refused)
