"""UpdateFeatures, versions 0–2 (KIP-584): changes the finalized levels of features, all of a request or none, as Kafka 4 does.

A refusal is the error of the whole response; its message names the feature.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.feature_updates import FeatureUpdate, UpgradeType, update_features
from stratalog_broker.protocol.durations import request_timeout_s
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import outcome_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import CLUSTER_NAME, Permissions, denial
from stratalog_metadata.client.api import MetadataClient

_ACCESS: Final = Access(Operation.ALTER, Resource.CLUSTER)


async def handle(context: RequestContext, request: Any, *, metadata: MetadataClient, permissions: Permissions) -> Any:
    updates = [_asked(row) for row in request.feature_updates]
    error: ErrorCode
    message: str | None
    if not permissions.allows_cluster(context, _ACCESS.operation):
        error, message = ErrorCode.cluster_authorization_failed, denial(context, _ACCESS, CLUSTER_NAME)
    else:
        timeout_s = request_timeout_s(request.timeout)
        error, message = await outcome_of(
            update_features(metadata, updates, timeout_s, validate_only=getattr(request, "validate_only", False))
        )
        if error is ErrorCode.invalid_update_version:
            message = f"no feature is updated: {message}"
    results = {}
    if context.reply.has("UpdateFeaturesResponse", "results"):
        changed = updates if error is ErrorCode.none else ()
        results = {
            "results": tuple(
                context.new("UpdatableFeatureResult", feature=each.name, error_code=error, error_message=None)
                for each in changed
            )
        }
    return context.new("UpdateFeaturesResponse", error_code=error, error_message=message, **results)


def _asked(row: Any) -> FeatureUpdate:
    is_downgrade = getattr(row, "allow_downgrade", False)
    upgrade_type = getattr(row, "upgrade_type", UpgradeType.SAFE_DOWNGRADE if is_downgrade else UpgradeType.UPGRADE)
    return FeatureUpdate(name=row.feature, level=row.max_version_level, upgrade_type=upgrade_type)


API: Final = HandlerInfo(key=57, min_version=0, max_version=2, handle=handle, access=_ACCESS)
