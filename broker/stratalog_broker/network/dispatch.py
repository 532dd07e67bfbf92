"""Passes an admitted request to its handler, and turns the result into a response or a closed connection."""

from __future__ import annotations

from stratalog_broker.protocol.entities import decode_request, encode_response
from stratalog_broker.protocol.frame import response_head
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo, Waiting
from stratalog_core.errors import Corrupt


def dispatch_raw(info: HandlerInfo, context: RequestContext, body: memoryview) -> Waiting | None:
    """Call a raw handler. A malformed request closes the connection; so does an unexpected exception, which is logged."""
    assert info.handle_raw is not None
    try:
        waiting: Waiting | None = info.handle_raw(context, body)
        return waiting
    except Corrupt as malformed:
        context.close_connection(malformed.message)
        context.release()
    except Exception:
        context.fail()
    return None


async def run_handler(info: HandlerInfo, context: RequestContext, body: memoryview) -> None:
    """Decode a request, await its handler, and send the response. A malformed request closes the connection.

    The caller releases the request if this fails or is cancelled, which may be before its first step.
    """
    assert info.handle is not None
    try:
        response = await info.handle(context, decode_request(info.key, context.api_version, body))
        encoded = response if isinstance(response, bytes) else encode_response(response)
        context.respond((response_head(info.key, context.api_version, context.correlation_id, len(encoded)), encoded))
    except Corrupt as malformed:
        context.close_connection(malformed.message)
        context.release()
