"""Checks whether a ledger has the quorums that its topic now asks for, and whether the bookies can take a new ledger."""

from __future__ import annotations

from stratalog_bookies.client import LedgerClient
from stratalog_core.errors import NotEnoughBookies
from stratalog_metadata.records import Ledger, Topic
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs


def is_roll_due(ledgers: LedgerClient, ledger: Ledger, topic: Topic, configs: TopicConfigs) -> bool:
    """Whether a ledger's quorums differ from its topic's, and there are enough bookies for a new ledger."""
    if has_quorums_of(ledger, topic, configs):
        return False
    try:
        ledgers.require_bookies(topic.replication_factor, configs.ack_quorum)
    except NotEnoughBookies:
        return False
    return True


def has_quorums_of(ledger: Ledger, topic: Topic, configs: TopicConfigs) -> bool:
    """Whether a ledger has the write quorum and ack quorum that its topic now asks for."""
    return (ledger.write_quorum, ledger.ack_quorum) == (topic.replication_factor, configs.ack_quorum)
