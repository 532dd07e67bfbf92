"""Planted faults of brokers that store batches with their topic's codec, run in ``outages``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from stratalog_broker.requests import produced_records
from stratalog_core.batches.batch import COMPRESSION_MASK, BatchHeader, read_header, write_header
from stratalog_core.batches.recompression import recompressed

Rewrite = Callable[[bytearray, BatchHeader], None]


def _then(change: Rewrite) -> None:
    """Change each rewritten batch, given its header."""

    def changed(*args: Any, **options: Any) -> bytearray | None:
        rewritten = recompressed(*args, **options)
        if rewritten is not None:
            change(rewritten, read_header(rewritten))
        return rewritten

    setattr(produced_records, "recompressed", changed)  # noqa: B010 - it is a function to the type checker


def rewritten_batches_lose_their_producer() -> None:
    """A retry of a rewritten batch is not recognised."""
    _then(lambda batch, header: write_header(batch, header._replace(producer_id=-1, producer_epoch=-1, base_sequence=-1)))


def rewritten_batches_keep_the_codec_of_before() -> None:
    """The header says how the producer compressed the records."""
    _then(lambda batch, header: write_header(batch, header._replace(attributes=header.attributes & ~COMPRESSION_MASK)))


IN_OUTAGES: Final = (rewritten_batches_lose_their_producer, rewritten_batches_keep_the_codec_of_before)
