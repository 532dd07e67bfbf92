"""Request admission, the same for every API: authenticate, check the version, throttle.

The handler runs after admission. It authorizes, because the names of topics and groups are in the request's body and denied
ones are answered one by one (``Permissions``). ``RequestMetrics`` measures the response. Without rules (``OPEN``) each step
except the version check costs one attribute read. The principal is determined once per connection.
"""

from __future__ import annotations

from typing import Final

from stratalog_broker.handlers.api_versions import encode_fallback
from stratalog_broker.protocol.frame import response_head
from stratalog_broker.requests.access import AccessRules
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.principal import ANONYMOUS, Principal
from stratalog_broker.requests.served_apis import ServedApis

_API_VERSIONS_KEY: Final = 18


class Admission:
    """Admits or refuses requests. There is one instance per broker."""

    def __init__(self, apis: ServedApis, rules: AccessRules) -> None:
        self._apis = apis
        self._by_key = apis.by_key
        self._quotas = rules.quotas
        self._authenticator = rules.authenticator

    def principal_of(self, listener: str, client_host: str) -> Principal | None:
        """Return the principal of a new connection; None if the client has to authenticate first."""
        return ANONYMOUS if self._authenticator is None else self._authenticator.principal_of(listener, client_host)

    def admit(self, context: RequestContext) -> HandlerInfo | None:
        """Return the handler for the request's API and version; None if the fallback answered it or it was refused."""
        info = self._by_key.get(context.api_key)
        if info is None or not info.min_version <= context.api_version <= info.max_version:
            self._refuse_version(context)
            return None
        if self._authenticator is not None and info.access is not None and context.principal is None:
            _refuse(context, "the client has not authenticated")
            return None
        if self._quotas is not None:
            context.throttle_ms = self._quotas.throttle_ms(context)
        return info

    def _refuse_version(self, context: RequestContext) -> None:
        if context.api_key == _API_VERSIONS_KEY:
            body = encode_fallback(self._apis)
            context.respond((response_head(_API_VERSIONS_KEY, 0, context.correlation_id, len(body)), body))
        else:
            # UNSUPPORTED_VERSION cannot be sent without a known response format. Kafka closes the connection too.
            _refuse(context, f"API {context.api_key} version {context.api_version} is not supported")


def _refuse(context: RequestContext, reason: str) -> None:
    context.close_connection(reason)
    context.release()
