"""How a link of the proxy may behave."""

from __future__ import annotations

from typing import Literal

Mode = Literal["pass", "cut", "cut-forward", "cut-backward", "slow", "reset"]
