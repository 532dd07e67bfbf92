"""The ledger client: quorum-replicated ledgers over bookies. ``docs/reference/protocols/ledger.md`` explains the protocol."""

from stratalog_bookies.client.config import LedgerClientSettings
from stratalog_bookies.client.core.entry import Entry, EntryHead
from stratalog_bookies.client.ledger import LedgerListener, LedgerSpec
from stratalog_bookies.client.ledger_client import LedgerClient
from stratalog_bookies.client.ledger_recovery import Recovered
from stratalog_bookies.client.ledger_writer import LedgerWriter

__all__ = [
    "Entry",
    "EntryHead",
    "LedgerClient",
    "LedgerClientSettings",
    "LedgerListener",
    "LedgerSpec",
    "LedgerWriter",
    "Recovered",
]
