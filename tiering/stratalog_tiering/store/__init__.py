"""Object stores: a local directory, S3 and compatible servers, Azure, Google Cloud. Only this folder imports their libraries.

``open_store`` takes ``/dir``, ``file:///dir``, ``s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1``,
``az://container/prefix?account=NAME`` or ``gs://bucket/prefix``. For S3, ``read_engine`` chooses how S3 is read: ``direct``
(default), ``obstore`` or ``aioboto3``. ``sse`` and ``sse_kms_key_id`` encrypt at rest.
``keys``, which a directory takes, too, names the directory of the key ring: workers encrypt the segments of topics that ask for
it before they leave the machine.
Credentials never come from the URL: for S3 from boto3's chain (environment, profile, web identity, container, instance), for
Azure from the environment or the machine's identity (``azure_settings.py``), for Google Cloud as for all of its clients
(``gcs_credentials.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from stratalog_core.errors import Invalid
from stratalog_core.ports import Background, Clock, Random
from stratalog_tiering.store.azure_settings import azure_settings
from stratalog_tiering.store.base import (
    PART_BYTES_MIN,
    KeyRing,
    Locked,
    ObjectInfo,
    ObjectStore,
    StoreFeatures,
    Upload,
    UploadedPart,
    delete_batches,
)
from stratalog_tiering.store.filesystem import FilesystemStore
from stratalog_tiering.store.key_ring import FileKeyRing, NoKeys
from stratalog_tiering.store.pieces import get_pieces
from stratalog_tiering.store.store_url import (
    S3Location,
    check_store_url,
    keys_directory,
    location_url,
    parse_azure_url,
    parse_gcs_url,
    parse_s3_url,
    shown_url,
)
from stratalog_tiering.store.with_copy import StoreWithCopy, read_verified

STORE_THREADS: Final = 8
"""Number of concurrent calls that a store's ``background`` should run."""

READ_ENGINES: Final = ("direct", "obstore", "aioboto3")
"""Ways to read from S3; the first is the default."""


def open_store(url: str, *, background: Background, clock: Clock, random: Random, threads: int = STORE_THREADS) -> ObjectStore:
    """The store at ``url``. Sends no request yet. Raises ``Invalid`` if the URL is wrong or there are no credentials."""
    check_store_url(url)
    if urlsplit(url).scheme == "s3":
        return _open_s3(url, background, threads)
    if urlsplit(url).scheme == "az":
        return _open_azure(url, background, clock, random, threads)
    if urlsplit(url).scheme == "gs":
        return _open_gcs(url, background, clock, random, threads)
    return FilesystemStore(_directory(url), background, clock, random, _keys(url))


def _keys(url: str) -> KeyRing:
    directory = keys_directory(url)
    return NoKeys() if directory is None else FileKeyRing(directory)


def _directory(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(parts.path)
    is_plain = not parts.netloc and path.is_absolute()
    if not is_plain or {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - {"keys"}:
        raise Invalid(
            f"store {shown_url(url)!r}: a local store must be an absolute directory, such as /dir or file:///dir; its only"
            " option is keys"
        )
    return path


def _open_s3(url: str, background: Background, threads: int) -> ObjectStore:
    # Importing boto3 takes a third of a second, which local stores do not need.
    from stratalog_tiering.store.s3 import S3Store

    location, options = parse_s3_url(url)
    read_engine = options.get("read_engine", READ_ENGINES[0])
    if read_engine not in READ_ENGINES:
        raise Invalid(
            f"store {shown_url(url)!r}: read_engine {read_engine!r} is unknown; choose one of {', '.join(READ_ENGINES)}"
        )
    return S3Store(location, read_engine=read_engine, background=background, threads=threads, keys=_keys(url))


def _open_azure(url: str, background: Background, clock: Clock, random: Random, threads: int) -> ObjectStore:
    # urllib3 and obstore are not imported for local stores.
    from stratalog_tiering.store.azure import AzureStore

    settings = azure_settings()
    location = parse_azure_url(url, settings)
    return AzureStore(
        location, settings, background=background, clock=clock, random=random, threads=threads, keys=_keys(url)
    )  # fmt: skip


def _open_gcs(url: str, background: Background, clock: Clock, random: Random, threads: int) -> ObjectStore:
    # google-auth, urllib3 and obstore are not imported for local stores.
    from stratalog_tiering.store.gcs import GcsStore

    return GcsStore(parse_gcs_url(url), background=background, clock=clock, random=random, threads=threads, keys=_keys(url))


def s3_location(url: str) -> S3Location:
    """Bucket, prefix, endpoint and region of ``s3://bucket/prefix?endpoint=…&region=…``. Raises ``Invalid``."""
    location, _ = parse_s3_url(url)
    return location


__all__ = [
    "PART_BYTES_MIN",
    "READ_ENGINES",
    "STORE_THREADS",
    "KeyRing",
    "Locked",
    "ObjectInfo",
    "ObjectStore",
    "StoreFeatures",
    "StoreWithCopy",
    "Upload",
    "UploadedPart",
    "check_store_url",
    "delete_batches",
    "get_pieces",
    "location_url",
    "open_store",
    "read_verified",
    "s3_location",
    "shown_url",
]
