"""One thing that takes bytes, and what must hold of it whatever the bytes are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from stratalog_core.errors import StratalogError

CORPUS: Final = Path(__file__).parent / "corpus"
MIB: Final = 1024 * 1024


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for one run, in memory where there is one."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="stratalog-fuzz-", dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``run`` takes any bytes and returns, or raises one of our errors: all else is a bug. ``seeds`` are sound inputs.

    ``allocated_bytes_max`` and ``allocated_per_byte_max`` bound what one run may hold at its peak: a fixed part and one for
    each byte of input.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    input_bytes_max: int = 64 * 1024
    allocated_bytes_max: int = 4 * MIB
    allocated_per_byte_max: int = 2048

    def execute(self, content: bytes) -> bool:
        """Whether ``content`` was accepted; raises what is a bug."""
        try:
            self.run(content)
        except StratalogError:
            return False
        return True

    def execute_measured(self, content: bytes) -> bool:
        """The same, within the bounds on memory."""
        tracemalloc.start()
        try:
            accepted = self.execute(content)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        limit = self.allocated_bytes_max + len(content) * self.allocated_per_byte_max
        assert peak <= limit, f"{self.name}: {len(content)} bytes made it allocate {peak}; the most is {limit}"
        return accepted

    @property
    def corpus(self) -> Path:
        """Where the kept inputs are: what the coverage-guided runs found, and what once was a bug."""
        return CORPUS / self.name

    def inputs(self) -> tuple[bytes, ...]:
        """Seeds, then the kept corpus in the order of its names."""
        return _inputs(self)


@cache
def _inputs(target: Target) -> tuple[bytes, ...]:
    kept = [path.read_bytes() for path in sorted(target.corpus.glob("*"))] if target.corpus.is_dir() else []
    return (*map(bytes, target.seeds()), *kept)
