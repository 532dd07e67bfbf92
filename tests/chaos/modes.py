"""The modes of a proxy link."""

from __future__ import annotations

from typing import Literal

Mode = Literal["pass", "cut", "cut-forward", "cut-backward", "slow", "late", "reset"]
