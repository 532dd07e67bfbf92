"""Maps failures of S3 requests to errors: the request had no effect, its outcome is unknown, or it was refused.

Botocore's exceptions (boto3 and aioboto3) are mapped, and by ``no_answer`` what aiohttp raises; ``obstore_reads.py`` maps
obstore's. A missing bucket is a configuration error and never counts as a missing object.

Only S3's own code means absence: a gateway or proxy may answer 404 for reasons of its own. The answer to a HEAD has no code,
so ``S3Catalogue.headers`` asks for the object once more.
"""

from __future__ import annotations

from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
)

from stratalog_core.errors import (
    Conflict,
    Corrupt,
    Invalid,
    NoSuchObject,
    OutcomeUnknown,
    Refused,
    StratalogError,
    Unavailable,
)
from stratalog_tiering.store.base import UnexplainedAbsence, UploadGone

_ABSENT: Final = frozenset({"NoSuchKey"})
_NOT_FOUND: Final = 404
_BEYOND_END: Final = frozenset({"InvalidRange", "416", "RequestedRangeNotSatisfiable"})
_EXISTS: Final = frozenset({"PreconditionFailed", "412"})
LOCKED_CODES: Final = frozenset({"ObjectLocked", "InvalidRequest"})
"""A deletion is refused because of a lock: by versitygw, by MinIO. S3 answers with one of ``REFUSED_CODES``."""
REFUSED_CODES: Final = frozenset(
    {"AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
)
_NOT_DONE: Final = frozenset(
    {"SlowDown", "ServiceUnavailable", "409", "ConditionalRequestConflict", "OperationAborted"}
    | {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
)
"""The request had no effect and may be repeated: the server is busy, or the body was damaged in transit."""
_NOT_OFFERED: Final = frozenset({"NotImplemented", "501"})
_TOO_MANY_REQUESTS: Final = 429
_UPLOAD_GONE: Final = frozenset({"NoSuchUpload"})
_NEVER_LEFT: Final = (ConnectTimeoutError, EndpointConnectionError)
_NO_CREDENTIALS: Final = (NoCredentialsError, PartialCredentialsError)


def from_botocore(failure: BotoCoreError | ClientError, key: str, place: str) -> StratalogError:
    """The error for a failed request about ``key``; ``OutcomeUnknown`` if the request may have had an effect."""
    if isinstance(failure, ClientError):
        return _from_answer(failure, key, place)
    if isinstance(failure, _NO_CREDENTIALS):
        return Invalid(no_credentials(place))
    if isinstance(failure, _NEVER_LEFT):
        return Unavailable(f"{place} cannot be reached: {failure}")
    return no_answer(failure, key, place)


def no_credentials(place: str) -> str:
    """The message for a process that finds no credentials."""
    return (
        f"{place}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_ROLE_ARN and"
        " AWS_WEB_IDENTITY_TOKEN_FILE, or run on an instance that has a role"
    )


def no_answer(failure: Exception, key: str, place: str) -> OutcomeUnknown:
    """The error for a request that was or may have been sent and got no complete response."""
    return OutcomeUnknown(f"{place} did not answer about {key}: {failure or type(failure).__name__}")


def _from_answer(failure: ClientError, key: str, place: str) -> StratalogError:
    code = str(failure.response.get("Error", {}).get("Code", ""))
    if code == "NoSuchBucket":
        return Refused(f"{place}: the bucket does not exist; create it first")
    if code in _ABSENT:
        return NoSuchObject(f"object {key} does not exist in {place}", key=key)
    if code in _BEYOND_END:
        return _ends_before(key, place)
    if code in _UPLOAD_GONE:
        return UploadGone(f"the upload of {key} does not exist in {place}", key=key)
    if code in _EXISTS:
        return Conflict(f"object {key} already exists in {place}", key=key)
    if code in REFUSED_CODES:
        return Refused(f"{place}: access to {key} was refused ({code}); check credentials and policy")
    if code in _NOT_OFFERED:
        return Invalid(f"{place} does not offer the request about {key}: {failure}")
    return _from_status(failure, code, key, place)


def _from_status(failure: ClientError, code: str, key: str, place: str) -> StratalogError:
    """The error for an answer whose code alone says too little."""
    status = int(failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if status == _NOT_FOUND and code in ("", str(_NOT_FOUND)):
        return UnexplainedAbsence(f"{place}: the answer about {key} is 404 without S3's code: is a proxy in between?")
    if code in _NOT_DONE or status == _TOO_MANY_REQUESTS:
        return Unavailable(f"{place} temporarily refused the request ({code})")
    if 400 <= status < 500:
        return Refused(f"{place}: request about {key} was refused: {failure}")
    return OutcomeUnknown(f"{place} failed at {key}: {failure}")


def _ends_before(key: str, place: str) -> Corrupt:
    return Corrupt(f"object {key} in {place} ends before the requested range", key=key)
