"""Where in S3 a store lives, and how its keys are called there. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stratalog_tiering.store.base import ObjectInfo, check_key


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """``prefix`` is empty or ends with ``/``. Without ``endpoint`` it is AWS."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def addressing(self) -> Literal["path", "auto"]:
        """Servers of one's own seldom have a name for each bucket."""
        return "path" if self.endpoint else "auto"

    def name(self, key: str) -> str:
        """The object's name in the bucket. Raises ``Invalid`` for a key that is not plain."""
        return self.prefix + check_key(key)

    def key(self, name: str) -> str:
        return name.removeprefix(self.prefix)


def object_info(key: str, size: int, etag: str, modified_s: float) -> ObjectInfo:
    """What S3 tells of an object; ``modified_s`` is seconds since 1970."""
    return ObjectInfo(key=key, size_bytes=size, etag=etag.strip('"'), last_modified_ms=int(modified_s * 1000))
