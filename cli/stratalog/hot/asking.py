"""Asks live bookies for their status. Metadata knows neither their corruption nor whether they refuse to delete ledgers."""

from __future__ import annotations

import asyncio
from typing import Final

from stratalog.hot.report import Row
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import BookieInfo
from stratalog_core.errors import StratalogError
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Bookie

_TIMEOUT_S: Final = 10.0

Answers = dict[str, BookieInfo | StratalogError]
"""The status of each bookie by its id, or the error of the request."""


async def ask_live(view: MetadataView) -> Answers:
    """Ask all live bookies at once."""
    live = [each for each in view.all(Bookie) if each.session_id]
    transport = TcpTransport()
    try:
        answers = await asyncio.gather(*(_ask(transport, each) for each in live))
    finally:
        await transport.close()
    return {each.bookie_id: answer for each, answer in zip(live, answers, strict=True)}


async def _ask(transport: TcpTransport, bookie: Bookie) -> BookieInfo | StratalogError:
    try:
        return messages.decode(BookieInfo, await transport.channel(bookie.address).call(messages.INFO, (), _TIMEOUT_S))
    except StratalogError as failure:
        return failure


def with_remarks(rows: list[Row], answers: Answers) -> list[Row]:
    """Return the rows of ``bookie_rows`` with a ``remark``: the problem that the bookie reports, or an empty text."""
    return [{**row, "remark": _remark(answers.get(row["bookie"]))} for row in rows]


def _remark(answer: BookieInfo | StratalogError | None) -> str:
    if isinstance(answer, StratalogError):
        return f"does not answer: {answer.message}"
    return f"deletes no ledgers: {answer.keeps_all}" if answer is not None and answer.keeps_all else ""
