"""Seals the open ledger of a partition whose topic was deleted, because the topic may be restored.

Bookies repair and move copies of sealed ledgers only. If sealing fails, the next owner seals the ledger after a restore.
"""

from __future__ import annotations

import logging

from stratalog_bookies.client import LedgerClient
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Ledger, LedgerState, Log, TopicPartition, ledger_key, log_key

_log = logging.getLogger(__name__)


async def seal_last(ledgers: LedgerClient, view: MetadataView, identity: TopicPartition) -> None:
    """Fence, recover and seal the ledgers that the last owner of a deleted partition left open. Does not raise."""
    log = view.find(Log, log_key(identity.topic_id, identity.partition))
    records = (view.find(Ledger, ledger_key(ref.ledger_id)) for ref in (log.ledgers if log is not None else ()))
    opened = [record.ledger_id for record in records if record is not None and record.state is not LedgerState.CLOSED]
    try:
        await ledgers.recover(opened)
    except StratalogError as failure:
        _log.info("the last ledger of %s, whose topic is deleted, is not sealed: %s", identity, failure)
