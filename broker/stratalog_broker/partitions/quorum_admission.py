"""Refuses batches of one partition before they are sent, if too few bookies could store them.

Kafka answers NOT_ENOUGH_REPLICAS while fewer replicas than ``min.insync.replicas`` are in sync. Here the bookies of the open
ledger count; while no ledger is open, those on which the next one could be placed.
"""

from __future__ import annotations

from typing import Final

from stratalog_bookies.client import LedgerClient, LedgerWriter
from stratalog_broker.partitions.pending_batch import Acks
from stratalog_core.errors import NotEnoughBookies
from stratalog_core.ports import Clock
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs

SETTLING_S: Final = 3.0


class QuorumAdmission:
    """Created with each takeover of the partition."""

    def __init__(self, ledgers: LedgerClient, clock: Clock) -> None:
        self._ledgers = ledgers
        self._clock = clock
        self._settled_at_s = clock.monotonic() + SETTLING_S

    @property
    def is_settling(self) -> bool:
        """Whether producers may still be resending batches that were refused because of a takeover or a lack of bookies.

        A batch that follows a refused one may already be in flight. Answering it OUT_OF_ORDER would make its producer begin a
        new epoch and resend batches that may already be stored.
        """
        return self._clock.monotonic() < self._settled_at_s

    def can_open(self, copies: int, configs: TopicConfigs) -> bool:
        """Return whether there are enough bookies for a new ledger."""
        try:
            self._ledgers.require_bookies(copies, configs.ack_quorum)
        except NotEnoughBookies:
            return False
        return True

    def check(self, writer: LedgerWriter | None, is_held: bool, copies: int, configs: TopicConfigs, acks: int) -> None:
        """Raise ``NotEnoughBookies`` if a batch cannot get the copies that ``acks`` asks for.

        ``writer`` is None while no ledger is open. ``is_held``: a handover is in progress, so this owner opens no ledger.
        """
        try:
            if acks == Acks.ALL and not configs.takes_acks_all:
                raise NotEnoughBookies(
                    f"min.insync.replicas is {configs.min_insync_replicas}; maximum is the replication factor, {copies}"
                )
            if writer is None and not is_held:
                self._ledgers.require_bookies(copies, configs.ack_quorum)
            elif acks == Acks.ALL and writer is not None and writer.lacks_quorum:
                ledger = writer.ledger
                raise NotEnoughBookies(f"fewer than {ledger.ack_quorum} bookies of ledger {ledger.ledger_id} answer")
        except NotEnoughBookies:
            self._settled_at_s = self._clock.monotonic() + SETTLING_S
            raise
