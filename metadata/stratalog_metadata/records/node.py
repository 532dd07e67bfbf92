"""Registered processes: brokers, bookies, tiering workers."""

from __future__ import annotations

import msgspec

from stratalog_metadata.records.base import RecordBase


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The address that a broker advertises to clients of one named listener."""

    listener: str
    host: str
    port: int


class Broker(RecordBase, frozen=True, kw_only=True, tag="broker"):
    """A live broker; the record is deleted with its session.

    ``host`` and ``port`` are advertised to clients of the unnamed listener, ``endpoints`` to those of named ones.
    ``stopping``: the broker is shutting down and waits until its partitions have other owners.
    """

    broker_id: int
    host: str
    port: int
    session_id: int
    rack: str = ""
    stopping: bool = False
    endpoints: tuple[Endpoint, ...] = ()

    def key(self) -> str:
        return broker_key(self.broker_id)

    def address_for(self, listener: str) -> tuple[str, int]:
        """Host and port for clients of ``listener``; those of the unnamed listener if this broker does not have it."""
        for endpoint in self.endpoints:
            if endpoint.listener == listener:
                return endpoint.host, endpoint.port
        return self.host, self.port


class DrainedBroker(RecordBase, frozen=True, kw_only=True, tag="drained_broker"):
    """An operator drains this broker: it owns nothing, live or not, until the record is removed."""

    broker_id: int

    def key(self) -> str:
        return drained_broker_key(self.broker_id)


class Bookie(RecordBase, frozen=True, kw_only=True, tag="bookie"):
    """A storage node, live while ``session_id`` is not 0. ``cookie`` identifies its disks; an empty disk has none.

    ``draining``: an operator decommissions it. It gets no new ledgers, and the auditor moves its closed ones. ``failed_disks``
    are positions among its ``disks`` that cannot be used: it has lost the ledgers whose id modulo ``disks`` is among them.
    ``full_disks`` are those that take no adds for lack of space; ``read_only``: none takes any.
    ``host`` names the machine that it shares with other bookies; empty: the host of ``address``. ``greatest_ledger_id`` is the
    greatest id of a ledger that it held or had deleted when the record was written (-1: none). ``low_on_space``: hot copies on
    it that are cold, too, should go.
    """

    bookie_id: str
    address: str
    cookie: str
    session_id: int = 0
    rack: str = ""
    read_only: bool = False
    draining: bool = False
    disks: int = 1
    failed_disks: tuple[int, ...] = ()
    host: str = ""
    greatest_ledger_id: int = -1
    low_on_space: bool = False
    full_disks: tuple[int, ...] = ()

    def key(self) -> str:
        return bookie_key(self.bookie_id)

    @property
    def failure_host(self) -> str:
        """The machine whose failure takes this bookie down."""
        return self.host or self.address.rpartition(":")[0]

    def has_failed_for(self, ledger_id: int) -> bool:
        """Whether the ledger's disk has failed."""
        return bool(self.failed_disks) and ledger_id % self.disks in self.failed_disks

    def takes(self, ledger_id: int) -> bool:
        """Whether the ledger's disk takes adds."""
        return not self.read_only and ledger_id % self.disks not in (*self.failed_disks, *self.full_disks)


class TieringWorker(RecordBase, frozen=True, kw_only=True, tag="tiering_worker"):
    """A live tiering worker."""

    worker_id: str
    session_id: int

    def key(self) -> str:
        return f"tiering_worker/{self.worker_id}"


def broker_key(broker_id: int) -> str:
    return f"broker/{broker_id}"


def drained_broker_key(broker_id: int) -> str:
    return f"drained_broker/{broker_id}"


def bookie_key(bookie_id: str) -> str:
    return f"bookie/{bookie_id}"
