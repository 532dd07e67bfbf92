"""ApiVersions (key 18), versions 0–4: returns the advertised APIs and versions of the handler table.

A request of an unknown version is answered in version 0 with UNSUPPORTED_VERSION and the table, so that the client can
choose (KIP-511); ``network/admission.py`` does that with ``encode_fallback``. Features are those of ``configs/features.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.features import FEATURES, finalized_features
from stratalog_broker.protocol.entities import encode_response, response_factory
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.served_apis import ServedApis
from stratalog_metadata.client.api import MetadataView

_KEY: Final = 18
_FEATURES_SINCE: Final = 3
_MINIMUM_0_SINCE: Final = 4
_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?\Z")
"""Kafka's rule for the names and versions of client libraries (KIP-511)."""
_SOFTWARE_CHARACTERS_MAX: Final = 100


async def handle(context: RequestContext, request: Any, *, apis: ServedApis, view: MetadataView) -> Any:
    """Return the handler table and the features; remember the client's library."""
    software = getattr(request, "client_software_name", ""), getattr(request, "client_software_version", "")
    if all(len(text) <= _SOFTWARE_CHARACTERS_MAX and _SOFTWARE.match(text) for text in software):
        context.client_software = software
    version = context.api_version
    return _response(apis, version, ErrorCode.none, _features(version, view) if version >= _FEATURES_SINCE else {})


def encode_fallback(apis: ServedApis) -> bytes:
    """Return the body of the version 0 response to a request of an unknown version."""
    return encode_response(_response(apis, 0, ErrorCode.unsupported_version, {}))


def _response(apis: ServedApis, version: int, code: ErrorCode, features: Mapping[str, Any]) -> Any:
    new = response_factory(_KEY, version)
    keys = tuple(
        new("ApiVersion", api_key=info.key, min_version=info.lowest_advertised, max_version=info.max_version)
        for info in sorted(apis.by_key.values(), key=lambda info: info.key)
        if info.is_advertised
    )
    return new("ApiVersionsResponse", error_code=code, api_keys=keys, **features)


def _features(version: int, view: MetadataView) -> dict[str, Any]:
    """Return the fields for features. As in Kafka, a feature at level 0 is not finalized."""
    new = response_factory(_KEY, version)
    finalized = finalized_features(view)
    return {
        "finalized_features_epoch": finalized.epoch,
        # Clients that send version 3 cannot read a minimum of 0 (KAFKA-17492).
        "supported_features": tuple(
            new("SupportedFeatureKey", name=one.name, min_version=0, max_version=one.max_level) for one in FEATURES
        )
        if version >= _MINIMUM_0_SINCE
        else (),
        "finalized_features": tuple(
            new("FinalizedFeatureKey", name=name, min_version_level=level, max_version_level=level)
            for name, level in finalized.levels.items()
            if level > 0
        ),
    }


API: Final = HandlerInfo(key=_KEY, min_version=0, max_version=4, handle=handle, access=None)
