"""Whether a ledger has the quorums that its topic asks for now, and whether the bookies could take one that has."""

from __future__ import annotations

from stratalog_bookies.client import LedgerClient
from stratalog_broker.configs.topic_configs import TopicConfigs
from stratalog_core.errors import NotEnoughBookies
from stratalog_metadata.records import Ledger, Topic


def is_roll_due(ledgers: LedgerClient, ledger: Ledger, topic: Topic, configs: TopicConfigs) -> bool:
    """Whether a ledger has other quorums than its topic asks for, and there are bookies for a new one."""
    if has_quorums_of(ledger, topic, configs):
        return False
    try:
        ledgers.require_bookies(topic.replication_factor, configs.ack_quorum)
    except NotEnoughBookies:
        return False
    return True


def has_quorums_of(ledger: Ledger, topic: Topic, configs: TopicConfigs) -> bool:
    """Whether a ledger has the copies and the ack quorum that its topic asks for now."""
    return (ledger.write_quorum, ledger.ack_quorum) == (topic.replication_factor, configs.ack_quorum)
