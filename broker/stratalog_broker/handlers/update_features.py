"""UpdateFeatures, versions 0–2 (KIP-584): an update to the level in force succeeds, every other one is refused by name.

Difference from Apache Kafka: levels belong to the software (``configs/features.py``), so nothing is ever changed.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.admin.errors import InvalidFeatureLevel
from stratalog_broker.admin.feature_updates import UpgradeType, check_feature_update
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.admin_errors import admin_error_code_of
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo
from stratalog_broker.requests.permissions import CLUSTER_NAME, Permissions, denial

_ACCESS: Final = Access(Operation.ALTER, Resource.CLUSTER)


async def handle(context: RequestContext, request: Any, *, permissions: Permissions) -> Any:
    error, message, rows = ErrorCode.none, None, list[tuple[str, ErrorCode, str | None]]()
    if not permissions.allows_cluster(context, _ACCESS.operation):
        error, message = ErrorCode.cluster_authorization_failed, denial(context, _ACCESS, CLUSTER_NAME)
    else:
        rows = [(update.feature, *_outcome(update)) for update in request.feature_updates]
    if not context.reply.has("UpdateFeaturesResponse", "results"):
        error, message = next(((code, text) for _, code, text in rows if code is not ErrorCode.none), (error, message))
    results = (
        context.new("UpdatableFeatureResult", feature=name, error_code=code, error_message=text) for name, code, text in rows
    )
    return context.new(
        "UpdateFeaturesResponse",
        error_code=error, error_message=message,
        results=tuple(results),
    )  # fmt: skip


def _outcome(update: Any) -> tuple[ErrorCode, str | None]:
    is_downgrade = getattr(update, "allow_downgrade", False)
    upgrade_type = getattr(update, "upgrade_type", UpgradeType.SAFE_DOWNGRADE if is_downgrade else UpgradeType.UPGRADE)
    try:
        check_feature_update(update.feature, update.max_version_level, upgrade_type)
    except InvalidFeatureLevel as refused:
        return admin_error_code_of(refused), refused.message
    return ErrorCode.none, None


API: Final = HandlerInfo(key=57, min_version=0, max_version=2, handle=handle, access=_ACCESS)
