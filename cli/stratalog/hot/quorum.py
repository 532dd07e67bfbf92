"""Administration of the metadata quorum, and rows about its members."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from stratalog.target import NoMetadata
from stratalog_core.errors import Invalid, Unavailable
from stratalog_core.natural_numbers import natural_number
from stratalog_core.rpc.addresses import split_address
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.client.administration import QuorumAdministration
from stratalog_metadata.protocol.messages import MemberStatus, StatusAnswer


@asynccontextmanager
async def administration_session(addresses: Sequence[str]) -> AsyncIterator[QuorumAdministration]:
    """A client for one command. Raises ``NoMetadata`` if the quorum does not answer it."""
    transport = TcpTransport()
    try:
        yield QuorumAdministration(addresses, transport, SystemClock(), random.Random())
    except Unavailable as failure:
        raise NoMetadata(failure.message) from failure
    finally:
        await transport.close()


def split_node(text: str) -> tuple[int, str]:
    """Split ``4=host:9300`` into node id and address. Raises ``Invalid``."""
    node, equals, address = text.partition("=")
    number = natural_number(node)
    if not (equals and number):
        raise Invalid(f"{text!r} is not ID=HOST:PORT with an ID of at least 1")
    split_address(address)
    return number, address


def member_rows(status: StatusAnswer) -> list[dict[str, Any]]:
    """Return one row per member. Values that the answering node does not know are None."""
    return [_row(member, status) for member in status.members]


def _row(member: MemberStatus, status: StatusAnswer) -> dict[str, Any]:
    known = member.match_index >= 0
    role = "leader" if member.node_id == status.leader else "voter" if member.voter else "learner"
    return {
        "node": member.node_id,
        "role": role,
        "address": member.address,
        "match_index": member.match_index if known else None,
        "lag": status.log_last_index - member.match_index if known else None,
        "contact_ms": member.contact_ms if member.contact_ms >= 0 else None,
        "identity": member.identity,
    }
