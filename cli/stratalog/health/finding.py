"""One finding of ``stratalog doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """OK: works. WARN: works in part, or may soon stop working. FAIL: does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``remedy`` is empty if the verdict is OK."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def ok(check: str, detail: str) -> Finding:
    return Finding(check=check, verdict=Verdict.OK, detail=detail)


def warn(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARN, detail=detail, remedy=remedy)


def fail(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.FAIL, detail=detail, remedy=remedy)
