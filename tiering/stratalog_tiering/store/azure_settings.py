"""The environment's settings of Azure: account, endpoint and credentials, by the names that Azure's tools and obstore read.

The first of these sources that is set gives the credentials: a connection string, the account's key, a shared access signature
(SAS), a token, a client secret, a workload identity; without any, the identity that Azure gives to the machine.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from stratalog_core.errors import Invalid

CONNECTION_STRING: Final = "AZURE_STORAGE_CONNECTION_STRING"
_ACCOUNT: Final = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
_KEY: Final = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY")
_SAS: Final = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
_ENDPOINT: Final = ("AZURE_STORAGE_ENDPOINT",)
_TOKEN: Final = ("AZURE_STORAGE_TOKEN",)
_CLIENT: Final = ("AZURE_CLIENT_ID",)
_TENANT: Final = ("AZURE_TENANT_ID",)
_SECRET: Final = ("AZURE_CLIENT_SECRET",)
_FEDERATED: Final = ("AZURE_FEDERATED_TOKEN_FILE",)
_AUTHORITY: Final = ("AZURE_AUTHORITY_HOST",)
_IDENTITY_ENDPOINT: Final = ("IDENTITY_ENDPOINT",)
_IDENTITY_HEADER: Final = ("IDENTITY_HEADER",)
_AUTHORITY_DEFAULT: Final = "https://login.microsoftonline.com"
_SUFFIX_DEFAULT: Final = "core.windows.net"
_CONNECTION_NAMES: Final = frozenset(
    {"defaultendpointsprotocol", "accountname", "accountkey", "blobendpoint", "endpointsuffix", "sharedaccesssignature"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings:
    """Empty: not set. ``repr`` shows no secret."""

    account: str = ""
    endpoint: str = ""
    key: bytes = field(default=b"", repr=False)
    sas: str = field(default="", repr=False)
    """A query string without its question mark."""
    token: str = field(default="", repr=False)
    client_id: str = ""
    tenant_id: str = ""
    client_secret: str = field(default="", repr=False)
    federated_token_file: str = ""
    authority: str = _AUTHORITY_DEFAULT
    identity_endpoint: str = ""
    identity_header: str = field(default="", repr=False)


def azure_settings(environment: Mapping[str, str] | None = None) -> AzureSettings:
    """The settings of ``environment``, by default the process's. Raises ``Invalid`` that names a variable, never its value."""
    given = os.environ if environment is None else environment

    def first(names: tuple[str, ...]) -> str:
        return next((given[name] for name in names if given.get(name)), "")

    connection = _connection(given.get(CONNECTION_STRING, ""))
    account, endpoint = connection.get("accountname", ""), connection.get("blobendpoint", "").rstrip("/")
    if account and not endpoint:
        protocol, suffix = (
            connection.get("defaultendpointsprotocol", "https"),
            connection.get("endpointsuffix", _SUFFIX_DEFAULT),
        )
        endpoint = f"{protocol}://{account}.blob.{suffix}"
    own_key, own_sas = connection.get("accountkey", ""), connection.get("sharedaccesssignature", "")
    key_text = own_key or ("" if own_sas else first(_KEY))
    return AzureSettings(
        account=account or first(_ACCOUNT),
        endpoint=endpoint or first(_ENDPOINT).rstrip("/"),
        key=_key(key_text, CONNECTION_STRING if own_key else " or ".join(_KEY)) if key_text else b"",
        sas=(own_sas or first(_SAS)).removeprefix("?"),
        token=first(_TOKEN),
        client_id=first(_CLIENT),
        tenant_id=first(_TENANT),
        client_secret=first(_SECRET),
        federated_token_file=first(_FEDERATED),
        authority=(first(_AUTHORITY) or _AUTHORITY_DEFAULT).rstrip("/"),
        identity_endpoint=first(_IDENTITY_ENDPOINT),
        identity_header=first(_IDENTITY_HEADER),
    )


def account_of(endpoint: str) -> str:
    """The account that an endpoint belongs to: the first label of Azure's own hosts, else the first part of the path."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    return host.partition(".")[0] if ".blob." in host else parts.path.strip("/").partition("/")[0]


def _connection(text: str) -> dict[str, str]:
    """The parts of a connection string, by name in lower case."""
    parts = dict(part.partition("=")[::2] for part in text.split(";") if part.strip())
    found = {name.strip().lower(): value.strip() for name, value in parts.items()}
    if text and not (found.keys() & {"accountname", "blobendpoint"} and found.keys() & {"accountkey", "sharedaccesssignature"}):
        raise Invalid(
            f"{CONNECTION_STRING} is incomplete: it must hold AccountName or BlobEndpoint, and AccountKey or"
            " SharedAccessSignature"
        )
    return {name: value for name, value in found.items() if name in _CONNECTION_NAMES}


def _key(text: str, variable: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise Invalid(f"the account key in {variable} is not base64: copy it whole") from None
