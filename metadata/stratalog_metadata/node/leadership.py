"""The leader's duties once it has applied every committed entry: run the controller, judge leases, create the cluster's
record.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence

from stratalog_core.errors import Retriable, StratalogError
from stratalog_core.ports import Clock, Connection, Random
from stratalog_metadata.controller.controller import TICK_S, Controller
from stratalog_metadata.controller.handovers import BalanceRules
from stratalog_metadata.node.pending_proposals import OnAnswers
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.protocol.messages import CommandAnswer, raised_error
from stratalog_metadata.records import CLUSTER_KEY, Cluster
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_metadata.state.record_map import RecordMap

Propose = Callable[[Command, OnAnswers], None]
_log = logging.getLogger(__name__)


class Leadership:
    """Active from when the leader's first entry is applied until :meth:`close`. ``propose`` may raise ``Retriable``."""

    def __init__(
        self,
        records: RecordMap,
        propose: Propose,
        clock: Clock,
        random: Random,
        cluster_id: str,
        rules: BalanceRules,
    ) -> None:  # fmt: skip
        self._propose = propose
        self._clock = clock
        self._controller = Controller(records, clock.monotonic(), rules)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._carriers: dict[Connection, Callable[[], None]] = {}
        self._timer = self._loop.call_later(TICK_S, self._tick)
        if records.get(CLUSTER_KEY) is None:
            self._found_cluster(cluster_id or _new_cluster_id(random))

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()
        for forget in self._carriers.values():
            forget()
        self._carriers.clear()

    def observe(self, changes: Sequence[Change]) -> None:
        self._controller.observe(changes, self._clock.monotonic())

    def renew(self, session_ids: Sequence[int], connection: Connection | None) -> list[int]:
        """Renew sessions and return those that are alive. ``connection`` carried the renewal; None if another node
        forwarded it, whose connection says nothing about the holder.
        """
        if connection is not None and connection not in self._carriers:
            self._carriers[connection] = connection.on_lost(self._carrier_lost)
        return self._controller.renew(session_ids, self._clock.monotonic(), connection)

    def report(self, load: BrokerLoad) -> None:
        """Record a broker's load report."""
        self._controller.loads.reported(load, self._clock.monotonic())

    def loads(self) -> list[BrokerLoad]:
        """Brokers' recent load reports."""
        return list(self._controller.loads.fresh(self._clock.monotonic()).values())

    def _carrier_lost(self, connection: Connection) -> None:
        del self._carriers[connection]
        suspects = self._controller.carrier_lost(connection, self._clock.monotonic())
        if suspects:
            _log.info("lost the connection of sessions %s: they end unless they are renewed soon", suspects)

    def drive(self) -> None:
        """Propose the controller's next command, if there is one."""
        command = self._controller.decide(self._clock.monotonic())
        if command is None:
            return
        try:
            self._propose(command, self._decided)
        except Retriable as refused:
            _log.info("the controller's command was not accepted: %s", refused)
            self._controller.decided(succeeded=False)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.drive()

    def _decided(self, answers: Sequence[CommandAnswer]) -> None:
        error = answers[0].error
        if error is not None:
            _log.info("the controller's command was refused and is decided again: %s", error.message)
        self._controller.decided(succeeded=error is None)

    def _found_cluster(self, cluster_id: str) -> None:
        command = Command(
            updates=(Put(record=Cluster(cluster_id=cluster_id)),),
            requirements=(VersionIs(key=CLUSTER_KEY, version=ABSENT),),
        )
        try:
            self._propose(command, _cluster_founded)
        except StratalogError as refused:
            _log.warning("the cluster's record could not be proposed: %s", refused)


def _cluster_founded(answers: Sequence[CommandAnswer]) -> None:
    error = answers[0].error
    if error is not None:
        _log.info("the cluster's record was not written: %s", raised_error(error))


def _new_cluster_id(random: Random) -> str:
    """A new cluster id of 22 characters like Kafka's: 16 random bytes in URL-safe base 64, not starting with a dash."""
    while True:
        cluster_id = urlsafe_b64encode(random.getrandbits(128).to_bytes(16, "big")).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id
