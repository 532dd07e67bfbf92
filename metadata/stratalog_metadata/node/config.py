"""Settings of a metadata node."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.config import setting
from stratalog_core.errors import Invalid
from stratalog_core.natural_numbers import natural_number
from stratalog_core.rpc.addresses import split_address
from stratalog_metadata.controller.handovers import BalanceRules
from stratalog_metadata.raft import RaftSettings

SECTION = "metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataSettings:
    """One node of the quorum. Without ``peers`` it is the whole quorum, as embedded by default."""

    data_dir: str = setting(help="directory of this node's log and state")
    node_id: int = setting(1, help="this node's number in the quorum", minimum=1, maximum=1_000_000)
    listen: str = setting("127.0.0.1:9300", help="HOST:PORT to listen on; port 0 takes any free port")
    peers: tuple[str, ...] = setting(
        (), help="nodes of the quorum as ID=HOST:PORT, including this one; all of them at the first start; empty: only this one"
    )
    cluster_id: str = setting("", help="id of the cluster; empty: the first leader generates one")
    election_timeout_ms: int = setting(
        500,
        help="minimum silence of the leader before an election begins; the actual time is random, up to twice as long",
        minimum=50,
        maximum=60_000,
    )
    heartbeat_ms: int = setting(100, help="interval of the leader's heartbeats", minimum=10, maximum=20_000)
    snapshot_entries: int = setting(
        10_000, help="log entries after which the log is truncated, up to the stored state", minimum=100, maximum=1_000_000
    )
    snapshot_bytes: int = setting(
        64 * 1024 * 1024,
        help="bytes of log in memory after which it is truncated, up to the stored state",
        minimum=65_536,
        maximum=4 * 1024**3,
    )
    kept_entries: int = setting(
        2_000, help="entries kept at truncation for nodes that are slightly behind", minimum=0, maximum=1_000_000
    )
    log_segment_bytes: int = setting(
        16 * 1024 * 1024, help="size at which a new log file is started", minimum=4096, maximum=1024**3
    )
    balance_interval_s: float = setting(
        10.0,
        help="seconds between rounds of partition balancing, and without other moves before one; 0: never",
        minimum=0,
        maximum=86_400,
    )
    balance_moves_max: int = setting(
        20, help="maximum number of partitions moved in one round of balancing", minimum=1, maximum=1_000
    )
    preferred_rack: str = setting(
        "", help="rack whose brokers own partitions of topics without preferred.leader.rack; empty: any"
    )
    watch_entries: int = setting(10_000, help="recent commands kept for watchers", minimum=10, maximum=1_000_000)
    watch_bytes: int = setting(
        64 * 1024 * 1024, help="bytes of recent changes kept for watchers", minimum=65_536, maximum=4 * 1024**3
    )

    def peer_addresses(self) -> dict[int, str]:
        """Addresses by node id, parsed from ``peers``. Raises ``Invalid``."""
        addresses: dict[int, str] = {}
        for peer in self.peers:
            node, equals, address = peer.partition("=")
            number = natural_number(node)
            if not equals or not number or not address:
                raise Invalid(f"[{SECTION}] peers: {peer!r} is not ID=HOST:PORT with an ID of at least 1")
            if number in addresses:
                raise Invalid(f"[{SECTION}] peers: node {number} is listed twice")
            try:
                split_address(address)
            except Invalid as wrong:
                raise Invalid(f"[{SECTION}] peers: {wrong.message}") from wrong
            addresses[number] = address
        if addresses and self.node_id not in addresses:
            raise Invalid(f"[{SECTION}] peers lists {sorted(addresses)}, but not this node, {self.node_id}: add it")
        return addresses

    def balance(self) -> BalanceRules:
        """The controller's balance rules."""
        return BalanceRules(
            interval_s=self.balance_interval_s, moves_max=self.balance_moves_max, preferred_rack=self.preferred_rack
        )

    def raft(self, identity: str = "") -> RaftSettings:
        """Settings of the Raft core; ``identity`` is that of the disk. Raises ``Invalid`` if the intervals contradict each
        other.
        """
        if self.heartbeat_ms * 2 > self.election_timeout_ms:
            raise Invalid(
                f"[{SECTION}] heartbeat_ms is {self.heartbeat_ms}; maximum is {self.election_timeout_ms // 2},"
                " half of election_timeout_ms"
            )
        return RaftSettings(
            node_id=self.node_id,
            identity=identity,
            election_timeout_s=self.election_timeout_ms / 1000,
            heartbeat_s=self.heartbeat_ms / 1000,
        )
