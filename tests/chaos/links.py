"""The connections between processes, each through its own port of the proxy: any one of them can be cut alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stratalog.local.state import ClusterState

CLIENTS = "clients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection from the process ``source`` to the process ``target``, which listens at ``address``."""

    source: str
    target: str
    address: str

    @property
    def name(self) -> str:
        return f"{self.source}>{self.target}"


_TARGETS = {
    "metadata": ("metadata",),
    # Bookies connect to bookies for re-replication.
    "bookie": ("metadata", "bookie"),
    "broker": ("metadata", "bookie", "store"),
    "tiering": ("metadata", "bookie", "store"),
}


def links_of(state: ClusterState) -> list[Link]:
    """Return all links of the cluster, those of its Kafka clients included."""
    links = [Link(source=CLIENTS, target=broker.name, address=broker.address) for broker in state.of_role("broker")]
    for process in state.processes:
        for role in _TARGETS.get(process.role, ()):
            links += [
                Link(source=process.name, target=target.name, address=target.address)
                for target in state.of_role(role)
                if target.name != process.name
            ]
    return links


def between(links: Iterable[Link], some: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the names of the links between any of ``some`` and any of ``others``, in both directions."""
    first, second = set(some), set(others)
    return [
        link.name
        for link in links
        if (link.source in first and link.target in second) or (link.source in second and link.target in first)
    ]
