"""Bucket set-up: creates a bucket, enables versioning, expires old versions, creates a MinIO account restricted to the bucket.

Every step can be repeated. Needs an administrator's credentials, which the roles of a cluster should not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError, PartialCredentialsError

from stratalog_core.errors import Invalid, StratalogError, Unavailable
from stratalog_tiering.store.s3_errors import no_credentials
from stratalog_tiering.store.store_url import S3Location

if TYPE_CHECKING:
    from minio import MinioAdmin

Result = TypeVar("Result")
_RETRY_S: Final = 0.2
_NOT_READY: Final = {"503", "500", "ServiceUnavailable", "SlowDown", "InternalError", "XMinioServerNotInitialized"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """An access key and its secret."""

    access_key: str
    secret_key: str


def s3_client(location: S3Location, credentials: Credentials | None) -> Any:
    """Return a boto3 client for the store of ``location``. Without ``credentials`` boto3 searches its usual sources.

    Raises ``Invalid`` if they are malformed or name a profile that does not exist.
    """
    try:
        return boto3.client(
            "s3",
            endpoint_url=location.endpoint,
            region_name=location.region,
            aws_access_key_id=credentials.access_key if credentials else None,
            aws_secret_access_key=credentials.secret_key if credentials else None,
            config=Config(
                s3={"addressing_style": location.addressing}, connect_timeout=2, read_timeout=10, retries={"max_attempts": 0}
            ),
        )
    except BotoCoreError as malformed:
        raise Invalid(f"s3://{location.bucket}: {malformed}; correct AWS_PROFILE, or the file that has it") from malformed


def create_bucket(client: Any, location: S3Location, *, timeout_s: float, object_lock: bool = False) -> bool:
    """Create the bucket as soon as the server answers. Returns False if the caller already owns it.

    Raises ``Unavailable`` after ``timeout_s``, ``Invalid`` if the server refuses or there are no credentials.
    """
    options: dict[str, Any] = {"ObjectLockEnabledForBucket": True} if object_lock else {}
    if location.region != "us-east-1":
        options["CreateBucketConfiguration"] = {"LocationConstraint": location.region}

    def create() -> bool:
        try:
            client.create_bucket(Bucket=location.bucket, **options)
        except client.exceptions.BucketAlreadyOwnedByYou:
            return False
        except (NoCredentialsError, PartialCredentialsError) as missing:
            raise Invalid(no_credentials(f"s3://{location.bucket}")) from missing
        return True

    return _when_ready(create, f"{location.endpoint or 'S3'}", timeout_s)


def require_object_lock(client: Any, bucket: str) -> None:
    """Raise ``Invalid`` unless the bucket, which existed already, has Object Lock; ``Unavailable`` if that cannot be told."""
    try:
        client.get_object_lock_configuration(Bucket=bucket)
    except (BotoCoreError, ClientError) as failure:
        if _code_of(failure) != "ObjectLockConfigurationNotFoundError":
            raise _refused(f"reading the Object Lock of bucket {bucket}", failure) from failure
        raise Invalid(
            f"bucket {bucket} exists and has no Object Lock, which it must have from its creation on: choose another name"
        ) from failure


def keep_versions(client: Any, bucket: str, days: int) -> None:
    """Enable versioning, and expire versions ``days`` after they were replaced or deleted.

    Raises ``Invalid`` or ``Unavailable``. Sets no rule that aborts incomplete multipart uploads: MinIO refuses or drops such a
    rule, and tiering workers abort them.
    """
    rule = {
        "ID": "expire-old-versions",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "NoncurrentVersionExpiration": {"NoncurrentDays": days},
        "Expiration": {"ExpiredObjectDeleteMarker": True},
    }
    try:
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
    except (BotoCoreError, ClientError) as failure:
        raise _refused(f"configuring bucket {bucket}", failure) from failure


def _when_ready(attempt: Callable[[], Result], server: str, timeout_s: float) -> Result:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt()
        except (BotoCoreError, ClientError) as failure:
            error = _refused(f"creating the bucket at {server}", failure)
            if not isinstance(error, Unavailable):
                raise error from failure
            if time.monotonic() > deadline:
                raise Unavailable(f"{server} did not accept requests within {timeout_s:.0f} s: {failure}") from failure
            time.sleep(_RETRY_S)


def _refused(what: str, failure: BotoCoreError | ClientError) -> StratalogError:
    if isinstance(failure, ParamValidationError):
        return Invalid(f"{what}: {failure}")
    code = _code_of(failure)
    if not code or code in _NOT_READY:
        return Unavailable(f"{what}: {failure}")
    return Invalid(f"{what} was refused: {failure}; check the administrator's credentials and the bucket's name")


def _code_of(failure: BotoCoreError | ClientError) -> str:
    return failure.response.get("Error", {}).get("Code", "") if isinstance(failure, ClientError) else ""


def bucket_policy(bucket: str) -> dict[str, Any]:
    """Return the policy that the roles of a cluster need: list and describe the bucket; read, write and delete objects."""
    whole_bucket = ["s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetBucketLocation"]
    # A probe asks for these; refused, they are reported as unknown.
    whole_bucket += ["s3:GetBucketVersioning", "s3:GetBucketObjectLockConfiguration"]
    objects = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    # Deletions name versions, and topics may lock what they write.
    whole_bucket += ["s3:ListBucketVersions"]
    objects += ["s3:DeleteObjectVersion", "s3:PutObjectRetention", "s3:GetObjectRetention"]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": whole_bucket, "Resource": [f"arn:aws:s3:::{bucket}"]},
            {"Effect": "Allow", "Action": objects, "Resource": [f"arn:aws:s3:::{bucket}/*"]},
        ],
    }


def make_minio_account(location: S3Location, administrator: Credentials, account: Credentials) -> None:
    """Create ``account`` on a MinIO server, or set its secret, and restrict it to the bucket of ``location``.

    Raises ``Invalid`` if the server refuses, ``Unavailable`` if it does not answer.
    """
    admin = _minio_admin(location, administrator)
    from minio.error import MinioAdminException
    from urllib3.exceptions import HTTPError

    policy = f"stratalog-{location.bucket}"
    try:
        admin.policy_add(policy, policy=bucket_policy(location.bucket))
        admin.user_add(account.access_key, account.secret_key)
        admin.policy_set(policy, user=account.access_key)
    except MinioAdminException as failure:
        raise Invalid(f"MinIO refused account {account.access_key!r}: {failure}") from failure
    except HTTPError as failure:
        raise Unavailable(f"MinIO at {location.endpoint} does not answer: {failure}") from failure


def _minio_admin(location: S3Location, administrator: Credentials) -> MinioAdmin:
    try:
        from minio import MinioAdmin
        from minio.credentials.providers import StaticProvider
    except ImportError as missing:
        raise Invalid('creating a MinIO account needs the `minio` package: pip install "stratalog[minio]"') from missing
    if not location.endpoint:
        raise Invalid("a MinIO account needs the server's address: --store s3://BUCKET?endpoint=http://HOST:PORT")
    endpoint = urlsplit(location.endpoint)
    return MinioAdmin(
        endpoint=endpoint.netloc,
        credentials=StaticProvider(administrator.access_key, administrator.secret_key),
        secure=endpoint.scheme == "https",
    )
