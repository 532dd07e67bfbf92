"""ApiVersions (key 18), versions 0–4: returns the advertised APIs and versions of the handler table.

A request of an unknown version is answered in version 0 with UNSUPPORTED_VERSION and the table, so that the client can
choose (KIP-511); ``network/admission.py`` does that with ``encode_fallback``. Features are those of ``configs/features.py``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.features import EPOCH, FEATURES
from stratalog_broker.protocol.entities import encode_response, response_factory
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.served_apis import ServedApis

_KEY: Final = 18
_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?\Z")
"""Kafka's rule for the names and versions of client libraries (KIP-511)."""
_SOFTWARE_CHARACTERS_MAX: Final = 100


async def handle(context: RequestContext, request: Any, *, apis: ServedApis) -> Any:
    """Return the handler table; remember the client's library."""
    software = getattr(request, "client_software_name", ""), getattr(request, "client_software_version", "")
    if all(len(text) <= _SOFTWARE_CHARACTERS_MAX and _SOFTWARE.match(text) for text in software):
        context.client_software = software
    return _response(apis, context.api_version, ErrorCode.none)


def encode_fallback(apis: ServedApis) -> bytes:
    """Return the body of the version 0 response to a request of an unknown version."""
    return encode_response(_response(apis, 0, ErrorCode.unsupported_version))


def _response(apis: ServedApis, version: int, code: ErrorCode) -> Any:
    new = response_factory(_KEY, version)
    keys = tuple(
        new("ApiVersion", api_key=info.key, min_version=info.lowest_advertised, max_version=info.max_version)
        for info in sorted(apis.by_key.values(), key=lambda info: info.key)
        if info.is_advertised
    )
    return new(
        "ApiVersionsResponse",
        error_code=code, api_keys=keys, finalized_features_epoch=EPOCH,
        supported_features=tuple(
            new("SupportedFeatureKey", name=one.name, min_version=one.level, max_version=one.level) for one in FEATURES
        ),
        finalized_features=tuple(
            new("FinalizedFeatureKey", name=one.name, min_version_level=one.level, max_version_level=one.level)
            for one in FEATURES
        ),
    )  # fmt: skip


API: Final = HandlerInfo(key=_KEY, min_version=0, max_version=4, handle=handle, access=None)
