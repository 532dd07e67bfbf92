"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """OK; WARN: works, but not for everything or not for long; FAIL: something does not work now."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``remedy`` is empty where all is well."""

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
