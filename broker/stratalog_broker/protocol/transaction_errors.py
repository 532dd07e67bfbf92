"""Codes of the transaction APIs that older clients do not know."""

from __future__ import annotations

from kio.schema.errors import ErrorCode


def known_to(code: ErrorCode, version: int, fenced_since: int) -> ErrorCode:
    """Return ``code``, or INVALID_PRODUCER_EPOCH for PRODUCER_FENCED in versions before ``fenced_since`` (KIP-588)."""
    if code is ErrorCode.producer_fenced and version < fenced_since:
        return ErrorCode.invalid_producer_epoch
    return code
