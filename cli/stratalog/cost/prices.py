"""Price files: TOML with what a GB, a request and a GB of traffic cost. Some are shipped in ``prices/`` beside this module.

A GB is 2**30 bytes, as S3 bills. A class with a minimum duration bills an object that is deleted earlier as if it had stayed;
one with a minimum size bills a smaller object as if it had that size. A request is PUT class (writes and listings) or GET class
(reads of objects and of their sizes). Deletions are free.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import msgspec

from stratalog_core.errors import Invalid, NotFound

GB: Final = 2**30
_MINIMUM_OBJECT_MAX: Final = 2**20
_FOLDER: Final = files("stratalog.cost") / "prices"
_Price = Annotated[float, msgspec.Meta(ge=0)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class ObjectPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prices of objects of one storage class."""

    storage_class: str = ""
    storage_per_gb_month: _Price
    minimum_days: Annotated[int, msgspec.Meta(ge=0, le=3650)] = 0
    minimum_object_bytes: Annotated[int, msgspec.Meta(ge=0, le=_MINIMUM_OBJECT_MAX)] = 0
    put_per_1000: _Price
    get_per_1000: _Price
    retrieval_per_gb: _Price = 0.0


class TransferPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of traffic out of the object store's network."""

    egress_per_gb: _Price = 0.0


class HotPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of the bookies' disks."""

    disk_per_gb_month: _Price


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price file. ``other_objects`` are manifests, markers and pages; None: they cost what segments do."""

    name: _Text
    currency: _Text
    as_of: _Text
    segments: ObjectPrices
    other_objects: ObjectPrices | None = None
    transfer: TransferPrices = TransferPrices()
    hot: HotPrices

    @property
    def others(self) -> ObjectPrices:
        """The prices of all objects that are not segments."""
        return self.other_objects or self.segments


def shipped_names() -> list[str]:
    """Names of the price files in this package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


def shipped_text(name: str) -> str:
    """The text of a shipped price file. Raises ``NotFound``."""
    if name not in shipped_names():
        raise NotFound(f"no prices {name!r}: choose one of {', '.join(shipped_names())}, or give a file's path")
    return (_FOLDER / f"{name}.toml").read_text()


def load_prices(given: str) -> Prices:
    """The shipped prices of this name, else those in the file of this path. Raises ``NotFound``, ``Invalid``."""
    if given in shipped_names():
        return parse_prices(shipped_text(given), given)
    try:
        return parse_prices(Path(given).read_text(), given)
    except FileNotFoundError:
        raise NotFound(f"no prices {given!r}: choose one of {', '.join(shipped_names())}, or give a file's path") from None
    except (OSError, UnicodeDecodeError) as unreadable:
        raise Invalid(f"price file {given} cannot be read: {unreadable}") from unreadable


def parse_prices(text: str, source: str) -> Prices:
    """The prices in ``text``, which comes from the file ``source``. Raises ``Invalid`` that names the wrong place."""
    try:
        return msgspec.convert(tomllib.loads(text), Prices, strict=True)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as wrong:
        remedy = "`stratalog cost --print-prices s3-standard` prints a complete one"
        raise Invalid(f"price file {source} is not valid: {wrong}; {remedy}") from wrong
