"""Encryption of blocks: AES-256-GCM under a data key that one segment has for itself.

A block is compressed first, then encrypted. Its stored bytes are the ciphertext and a tag of ``TAG_BYTES``; CRC and length are
over stored bytes, Merkle leaves over batches. Offsets and plain length are authenticated with the content, so that a block of
the same segment in another place is refused. The data key is stored in an object of its own, encrypted by a key that the store
does not have (``store/key_ring.py``). No I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
_PLACE: Final = struct.Struct(">qqQ")


class BlockCipher:
    """Encrypts and decrypts the blocks of one segment."""

    def __init__(self, data_key: bytes) -> None:
        """``data_key`` has 32 bytes, and is used for no other segment: nonces are the blocks' numbers."""
        self._aead = AESGCM(data_key)

    def encrypt(
        self, number: int, content: Buffer, base_offset: int, last_offset: int, plain_length: int
    ) -> tuple[bytes, bytes]:
        """Nonce and stored bytes of the segment's block ``number``, which is encrypted once."""
        nonce = number.to_bytes(NONCE_BYTES, "big")
        return nonce, self._aead.encrypt(nonce, content, _PLACE.pack(base_offset, last_offset, plain_length))

    def decrypt(self, nonce: bytes, stored: Buffer, base_offset: int, last_offset: int, plain_length: int) -> bytes:
        """The content of a block. Raises ``Corrupt`` if it was encrypted by another key, for another place, or altered."""
        try:
            return self._aead.decrypt(nonce, stored, _PLACE.pack(base_offset, last_offset, plain_length))
        except InvalidTag:
            raise Corrupt(
                f"block of offsets {base_offset}..{last_offset} does not decrypt with its segment's data key"
            ) from None


@dataclass(frozen=True, slots=True)
class SegmentEncryption:
    """How a new segment's blocks are encrypted. ``data_key`` is the key of the object that holds the wrapped data key."""

    data_key: str
    cipher: BlockCipher


def data_key_context(topic_id: UUID, partition: int) -> bytes:
    """Authenticated with a data key, so that the wrapped key of another partition is refused."""
    return b"stratalog data key 1 %s %d" % (topic_id.hex.encode(), partition)
