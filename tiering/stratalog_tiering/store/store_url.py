"""Store URLs: parsing, validation, and display without secrets.

A URL never holds credentials: one that does is refused, and no error, log or report repeats them. A refused URL is displayed
only through :func:`shown_url`; an accepted one may be displayed as it is. Opens nothing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from stratalog_core.errors import Invalid
from stratalog_tiering.store.azure_settings import AzureSettings, account_of, azure_settings
from stratalog_tiering.store.base import check_key

OPTIONS: Final = frozenset({"endpoint", "region", "read_engine", "sse", "sse_kms_key_id", "keys", "account"})
_S3_OPTIONS: Final = OPTIONS - {"account"}
_AZURE_OPTIONS: Final = frozenset({"account", "endpoint", "keys"})
_GCS_OPTIONS: Final = frozenset({"endpoint", "keys"})
STORE_URL_CONFIG: Final = "stratalog.store.url"
"""The broker config that tells clients the store, as :func:`location_url` of the broker's own."""
SSE_MODES: Final = ("AES256", "aws:kms")
"""Server-side encryption with the store's own keys (SSE-S3), or with a key of its key management (SSE-KMS)."""
_REGION_DEFAULT: Final = "us-east-1"
_HIDDEN: Final = "***"
_OPTION_NAME: Final = re.compile(r"[a-z_]{1,40}")
_CONTAINER: Final = re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}")
_GCS_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_GCS_ENDPOINT: Final = "https://storage.googleapis.com"
_ACCOUNT: Final = re.compile(r"[a-z0-9]{3,24}")
_OPTION_VALUE: Final = re.compile(r"[A-Za-z0-9._:/\-\[\]%]*")
_USAGE: Final = (
    "use s3://bucket/prefix with the options endpoint (http://host:port or https://…), region, read_engine, sse,"
    " sse_kms_key_id, keys (an absolute directory); set credentials in the environment: AWS_ACCESS_KEY_ID and"
    " AWS_SECRET_ACCESS_KEY"
)
_AZURE_USAGE: Final = (
    "use az://container/prefix with the options account, endpoint (https://… of the account's blob service), keys (an absolute"
    " directory); set credentials in the environment, such as AZURE_STORAGE_CONNECTION_STRING"
)
_GCS_USAGE: Final = (
    "use gs://bucket/prefix with the options endpoint (https://… of another host of the service, or http://host:port of an"
    " emulator), keys (an absolute directory); set credentials in the environment: GOOGLE_APPLICATION_CREDENTIALS"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """``prefix`` of the names of objects is empty or ends with ``/``."""

    prefix: str

    def name(self, key: str) -> str:
        """The object's name in the bucket. Raises ``Invalid`` for a key that is not plain."""
        return self.prefix + check_key(key)

    def key(self, name: str) -> str:
        return name.removeprefix(self.prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location(_Location):
    """Where in S3 a store is. ``endpoint`` None means AWS.

    ``sse`` is one of ``SSE_MODES``, or empty: then the bucket's own setting applies.
    """

    bucket: str
    endpoint: str | None
    region: str
    sse: str = ""
    sse_kms_key_id: str = ""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def addressing(self) -> Literal["path", "auto"]:
        """Addressing style: private servers seldom have a DNS name for each bucket."""
        return "path" if self.endpoint else "auto"

    @property
    def encryption(self) -> dict[str, str]:
        """Arguments of the requests that create objects."""
        given = {"ServerSideEncryption": self.sse, "SSEKMSKeyId": self.sse_kms_key_id}
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureLocation(_Location):
    """Where in Azure Blob Storage a store is. ``endpoint`` is of the account."""

    container: str
    account: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"az://{self.container}/{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsLocation(_Location):
    """Where in Google Cloud Storage a store is."""

    bucket: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"gs://{self.bucket}/{self.prefix}"

    @property
    def has_credentials(self) -> bool:
        """An endpoint without TLS gets none."""
        return self.endpoint.startswith("https://")


def shown_url(url: str) -> str:
    """``url`` for display: everything that is not plainly a bucket, a path or a known option is replaced by ``***``."""
    whole, _, fragment = url.partition("#")
    place, _, query = whole.partition("?")
    shown = _shown_place(place)
    if query:
        shown += "?" + "&".join(map(_shown_option, query.split("&")))
    return f"{shown}#{_HIDDEN}" if fragment else shown


def _shown_place(place: str) -> str:
    scheme, separator, rest = place.partition("://")
    if not separator:
        return place
    netloc, _, path = rest.partition("/")
    may_hold_user = "@" in unquote(path) and scheme != "file"
    return f"{scheme}://{_HIDDEN}" if may_hold_user or {"@", ":"} & set(unquote(netloc)) else place


def _shown_option(option: str) -> str:
    name, _, value = option.partition("=")
    if not _OPTION_NAME.fullmatch(name):
        return _HIDDEN
    is_plain = name in OPTIONS and _OPTION_VALUE.fullmatch(value) and (name != "endpoint" or _is_endpoint(unquote(value)))
    return option if is_plain else f"{name}={_HIDDEN}"


def check_store_url(url: str) -> None:
    """Raise ``Invalid`` unless ``url`` names a directory or is a valid ``s3://``, ``az://`` or ``gs://`` URL. Opens nothing."""
    scheme = _split(url).scheme
    if scheme == "s3":
        parse_s3_url(url)
    elif scheme == "az":
        parse_azure_url(url)
    elif scheme == "gs":
        parse_gcs_url(url)
    elif scheme not in ("", "file"):
        raise Invalid(
            f"store {shown_url(url)!r} has an unknown scheme; use /dir, file:///dir, s3://bucket/prefix?endpoint=…&region=…,"
            " az://container/prefix?account=… or gs://bucket/prefix"
        )


def parse_s3_url(url: str) -> tuple[S3Location, dict[str, str]]:
    """Location and options of an ``s3://`` URL. Raises ``Invalid``."""
    parts = _split(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    endpoint = options.get("endpoint", "")
    is_ours = parts.scheme == "s3" and parts.netloc and not parts.fragment and set(options) <= _S3_OPTIONS
    if not is_ours or ":" in parts.netloc or "@" in parts.netloc + parts.path or not _is_endpoint(endpoint):
        raise Invalid(f"store {shown_url(url)!r}: {_USAGE}")
    location = S3Location(
        bucket=parts.netloc,
        prefix=parts.path.strip("/") + "/" if parts.path.strip("/") else "",
        endpoint=endpoint or None,
        region=options.get("region") or _region_of_environment(),
        sse=options.get("sse", ""),
        sse_kms_key_id=options.get("sse_kms_key_id", ""),
    )
    _check_encryption(location, url)
    keys_directory(url)
    return location, options


def parse_azure_url(url: str, settings: AzureSettings | None = None) -> AzureLocation:
    """Location of an ``az://`` URL; what it does not say is by ``settings`` or the environment. Raises ``Invalid``."""
    parts = _split(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    is_ours = parts.scheme == "az" and not parts.fragment and set(options) <= _AZURE_OPTIONS
    if (
        not is_ours
        or not _CONTAINER.fullmatch(parts.netloc)
        or "@" in parts.path
        or not _is_endpoint(options.get("endpoint", ""))
    ):
        raise Invalid(f"store {shown_url(url)!r}: {_AZURE_USAGE}")
    keys_directory(url)
    known = settings or azure_settings()
    account, endpoint = options.get("account", ""), options.get("endpoint", "").rstrip("/")
    if not endpoint and account in ("", known.account):
        endpoint = known.endpoint
    account = account or account_of(endpoint) or known.account
    if not _ACCOUNT.fullmatch(account):
        raise Invalid(f"store {shown_url(url)!r}: no account; add ?account=NAME, or set AZURE_STORAGE_ACCOUNT_NAME")
    return AzureLocation(
        container=parts.netloc,
        prefix=_prefix(parts),
        account=account,
        endpoint=endpoint or f"https://{account}.blob.core.windows.net",
    )


def parse_gcs_url(url: str) -> GcsLocation:
    """Location of a ``gs://`` URL. Raises ``Invalid``."""
    parts = _split(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    endpoint = options.get("endpoint", "").rstrip("/")
    is_ours = parts.scheme == "gs" and not parts.fragment and set(options) <= _GCS_OPTIONS
    if not is_ours or not _GCS_BUCKET.fullmatch(parts.netloc) or "@" in parts.path or not _is_endpoint(endpoint):
        raise Invalid(f"store {shown_url(url)!r}: {_GCS_USAGE}")
    keys_directory(url)
    return GcsLocation(bucket=parts.netloc, prefix=_prefix(parts), endpoint=endpoint or _GCS_ENDPOINT)


def location_url(url: str) -> str:
    """The store at ``url`` as other machines address it: place, endpoint and region, but neither keys nor other options."""
    parts = _split(url)
    if parts.scheme == "az":
        found = parse_azure_url(url)
        return f"{found.url}?{urlencode({'account': found.account, 'endpoint': found.endpoint}, safe='/:')}"
    if parts.scheme == "gs":
        bucket = parse_gcs_url(url)
        return bucket.url if bucket.endpoint == _GCS_ENDPOINT else f"{bucket.url}?endpoint={bucket.endpoint}"
    if parts.scheme != "s3":
        return f"file://{parts.path}"
    location, _ = parse_s3_url(url)
    given = {"endpoint": location.endpoint, "region": location.region}
    return f"{location.url}?{urlencode({name: text for name, text in given.items() if text}, safe='/:')}"


def keys_directory(url: str) -> Path | None:
    """The directory of the key ring that the option ``keys`` names, or None. Raises ``Invalid`` unless it is absolute."""
    given = dict(parse_qsl(_split(url).query, keep_blank_values=True)).get("keys")
    if given is None:
        return None
    directory = Path(given)
    if not directory.is_absolute():
        raise Invalid(f"store {shown_url(url)!r}: keys must be an absolute directory")
    return directory


def _prefix(parts: SplitResult) -> str:
    """The prefix of a location. Raises ``Invalid`` unless it consists of plain names."""
    prefix = parts.path.strip("/")
    return f"{check_key(prefix)}/" if prefix else ""


def _region_of_environment() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _REGION_DEFAULT


def _check_encryption(location: S3Location, url: str) -> None:
    if location.sse and location.sse not in SSE_MODES:
        raise Invalid(f"store {shown_url(url)!r}: sse is unknown; choose one of {', '.join(SSE_MODES)}")
    if location.sse_kms_key_id and location.sse != "aws:kms":
        raise Invalid(f"store {shown_url(url)!r}: sse_kms_key_id needs sse=aws:kms")


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise Invalid(f"store {shown_url(url)!r} is not a URL: {_USAGE}") from None


def _is_endpoint(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        return False
    is_plain = parts.scheme in ("http", "https") and parts.netloc and not parts.query and not parts.fragment
    return not endpoint or bool(is_plain and "@" not in endpoint)
