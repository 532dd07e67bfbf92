"""Planted faults of brokers and tiering, looked for in the ``log`` scenario."""

from __future__ import annotations

from typing import Final

MUTANTS: Final = ()
