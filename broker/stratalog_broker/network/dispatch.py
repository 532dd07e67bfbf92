"""From a request's header to its handler, and from the handler's result to a response or a closed connection."""

from __future__ import annotations

from typing import Final

from stratalog_broker.handlers.api_versions import encode_fallback
from stratalog_broker.protocol.entities import decode_request, encode_response
from stratalog_broker.protocol.frame import response_head
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo, Waiting
from stratalog_broker.requests.served_apis import ServedApis
from stratalog_core.errors import Corrupt

_API_VERSIONS_KEY: Final = 18


def find_handler(apis: ServedApis, context: RequestContext) -> HandlerInfo | None:
    """The handler for API and version; None if the request is finished: answered by the fallback, or refused."""
    info = apis.by_key.get(context.api_key)
    if info is not None and info.min_version <= context.api_version <= info.max_version:
        return info
    if context.api_key == _API_VERSIONS_KEY:
        body = encode_fallback(apis)
        context.respond((response_head(_API_VERSIONS_KEY, 0, context.correlation_id, len(body)), body))
    else:
        # There is no response format to say UNSUPPORTED_VERSION in; Kafka closes the connection too.
        context.close_connection(f"API {context.api_key} version {context.api_version} is not served")
        context.release()
    return None


def dispatch_raw(info: HandlerInfo, context: RequestContext, body: memoryview) -> Waiting | None:
    """Call a raw handler. A malformed request closes the connection; so does a defect of ours, which is logged."""
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
    """Handle a request from its entity to its answer."""
    assert info.handle is not None
    try:
        response = await info.handle(context, decode_request(info.key, context.api_version, body))
        encoded = response if isinstance(response, bytes) else encode_response(response)
        context.respond((response_head(info.key, context.api_version, context.correlation_id, len(encoded)), encoded))
    except Corrupt as malformed:
        context.close_connection(malformed.message)
        context.release()
    except BaseException:
        context.release()
        raise
