"""Checks that brokers can take over internal topics. Asks bookies, because metadata may name ledgers that are gone."""

from __future__ import annotations

from stratalog.health.finding import Finding, fail, ok
from stratalog.hot.session import ledger_client
from stratalog.tier.lost_coordinators import COMMAND, find_lost, lost_text
from stratalog_metadata.client.quorum_client import QuorumClient

_CHECK = "coordinators"


async def check_coordinators(metadata: QuorumClient) -> Finding:
    """Check for partitions of internal topics whose ledgers no bookie has, as after a restore of metadata from an old copy."""
    async with ledger_client(metadata) as ledgers:
        found = await find_lost(metadata.view, ledgers)
    if found.lost:
        return fail(_CHECK, lost_text(found.lost), f"`{COMMAND} --dry-run` shows what the bucket has of them")
    return ok(_CHECK, "no partition of an internal topic has lost its ledgers")
