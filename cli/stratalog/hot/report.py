"""Rows about bookies and ledgers, from the metadata view. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stratalog_bookies.repair.core.audit_plan import copies_by_bookie
from stratalog_core.errors import NoSuchLedger, NotFound
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Bookie, Ledger, LedgerState, Topic, ledger_key, topic_key

Row = dict[str, Any]


def bookie_rows(view: MetadataView) -> list[Row]:
    """Return one row per bookie. ``fragments`` counts the ledger fragments that name it."""
    fragments = copies_by_bookie(view.all(Ledger))
    return [
        {
            "bookie": each.bookie_id,
            "state": bookie_state(each, fragments[each.bookie_id]),
            "live": each.session_id != 0,
            "read_only": each.read_only,
            "draining": each.draining,
            "host": each.failure_host,
            "rack": each.rack,
            "address": each.address,
            "fragments": fragments[each.bookie_id],
        }
        for each in view.all(Bookie)
    ]


def bookie_state(bookie: Bookie, fragments: int) -> str:
    """Return the bookie's state in one word."""
    if bookie.draining:
        return "draining" if fragments else "decommissioned"
    if not bookie.session_id:
        return "down"
    return "read-only" if bookie.read_only else "live"


def ledger_rows(view: MetadataView, topic: str | None) -> list[Row]:
    """Return one row per ledger of ``topic``, or of all topics. Raises ``NotFound`` for a topic that does not exist."""
    if topic is not None and view.find(Topic, topic_key(topic)) is None:
        raise NotFound(f"no topic {topic!r}: see `stratalog topic list`")
    names = {each.topic_id: each.name for each in view.all(Topic)}
    live = live_bookies(view)
    rows = (ledger_row(ledger, names.get(ledger.topic_id, "(deleted)"), live) for ledger in view.all(Ledger))
    return [row for row in rows if topic is None or row["topic"] == topic]


def ledger_row(ledger: Ledger, topic: str, live: Mapping[str, Bookie]) -> Row:
    """Return a ledger's row. Only closed ledgers have sizes and an end. ``lacking`` counts copies that cannot be used."""
    closed = ledger.state is LedgerState.CLOSED
    named = [name for fragment in ledger.fragments for name in fragment.bookies]
    return {
        "ledger": ledger.ledger_id,
        "topic": topic,
        "partition": ledger.partition,
        "state": str(ledger.state),
        "base_offset": ledger.base_offset,
        "end_offset": ledger.end_offset if closed else None,
        "entries": ledger.last_entry + 1 if closed else None,
        "bytes": ledger.payload_bytes if closed else None,
        "lacking": sum(is_lacking(live, name, ledger.ledger_id) for name in named),
        "bookies": list(dict.fromkeys(named)),
    }


def ledger_document(view: MetadataView, ledger_id: int) -> Row:
    """Return everything that metadata has about one ledger. Raises ``NoSuchLedger``."""
    ledger = ledger_named(view, ledger_id)
    names = {each.topic_id: each.name for each in view.all(Topic)}
    live = live_bookies(view)
    return {
        **ledger_row(ledger, names.get(ledger.topic_id, "(deleted)"), live),
        "leader_epoch": ledger.leader_epoch,
        "write_quorum": ledger.write_quorum,
        "ack_quorum": ledger.ack_quorum,
        "closed_at_ms": ledger.closed_at_ms,
        "fragments": list(_fragments(ledger, live)),
    }


def ledger_named(view: MetadataView, ledger_id: int) -> Ledger:
    """Return the ledger's record. Raises ``NoSuchLedger``."""
    ledger = view.find(Ledger, ledger_key(ledger_id))
    if ledger is None:
        raise NoSuchLedger(f"no ledger {ledger_id}: it may have moved to the object store; see `stratalog ledger list`")
    return ledger


def live_bookies(view: MetadataView) -> dict[str, Bookie]:
    return {each.bookie_id: each for each in view.all(Bookie) if each.session_id}


def is_lacking(live: Mapping[str, Bookie], name: str, ledger_id: int) -> bool:
    """Whether a bookie's copy of a ledger cannot be used: the bookie is down, or its disk for the ledger has failed."""
    return name not in live or live[name].has_failed_for(ledger_id)


def _fragments(ledger: Ledger, live: Mapping[str, Bookie]) -> Iterator[Row]:
    for fragment in ledger.fragments:
        down = [name for name in fragment.bookies if is_lacking(live, name, ledger.ledger_id)]
        yield {"first_entry": fragment.first_entry, "bookies": list(fragment.bookies), "down": down}
