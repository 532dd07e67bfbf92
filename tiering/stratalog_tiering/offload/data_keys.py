"""Data keys of segments: made and stored before a segment is written, wrapped anew when the key that protects them changes.

Each is an object beside its segment. The sweep of orphans deletes it once the segment is gone.
"""

from __future__ import annotations

import logging
from typing import Final
from uuid import UUID

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, StorageFailed
from stratalog_tiering.format.block_cipher import BlockCipher, SegmentEncryption, data_key_context
from stratalog_tiering.format.descriptor import WrappedDataKey, decode_descriptor, encode_descriptor
from stratalog_tiering.format.object_keys import data_key_key, is_data_key, topic_prefixes
from stratalog_tiering.store import ObjectStore

_REWRAPPED_AT_ONCE: Final = 8
_log = logging.getLogger(__name__)


async def new_encryption(
    store: ObjectStore, topic_id: UUID, partition: int, segment: str, key_name: str
) -> SegmentEncryption | None:
    """A new data key for the segment that will be at the key ``segment``, stored wrapped; None without a ``key_name``.

    Raises ``StorageFailed`` that names a key which the store's key ring does not have.
    """
    if not key_name:
        return None
    data_key, wrapped = await store.keys.make(key_name, data_key_context(topic_id, partition))
    stored = WrappedDataKey(topic_id=topic_id, partition=partition, key_name=key_name, wrapped=wrapped)
    key = data_key_key(segment)
    await store.put(key, [encode_descriptor(stored)])
    return SegmentEncryption(data_key=key, cipher=BlockCipher(data_key))


async def rewrap_topic(store: ObjectStore, topic_id: UUID, key_name: str, *, passes_over: bool = False) -> int:
    """Wrap all data keys of a topic that ``store`` lists, until a listing shows none to wrap; returns how many were.

    It may have some of segments that no version there refers to: not yet, or no more. Those that are damaged, or that the key
    ring cannot unwrap, are logged and left if it ``passes_over`` them. Raises as :func:`rewrap`.
    """

    async def again(key: str) -> bool:
        try:
            return await rewrap(store, key, key_name)
        except NoSuchObject:
            return False  # A sweep has deleted it since.
        except (Corrupt, Invalid, StorageFailed) as unreadable:
            if not passes_over:
                raise
            _log.warning("a data key is left as it is: %s: %s", key, unreadable.message)
            return False

    total = 0
    while True:
        keys = [info.key async for info in store.list(topic_prefixes(topic_id)[0]) if is_data_key(info.key)]
        rewrapped = sum(await bounded_map(again, keys, _REWRAPPED_AT_ONCE))
        if not rewrapped:
            return total
        total += rewrapped


async def rewrap(store: ObjectStore, data_key: str, key_name: str) -> bool:
    """Wrap the data key in the object ``data_key`` by the key ``key_name``; False if it is already.

    An interruption changes nothing or leaves the object rewritten: it is replaced as a whole. Raises as ``KeyRing`` does.
    """
    stored = decode_descriptor(await store.get(data_key), WrappedDataKey, data_key)
    if stored.key_name == key_name:
        return False
    context = data_key_context(stored.topic_id, stored.partition)
    plain = await store.keys.unwrap(stored.key_name, stored.wrapped, context)
    wrapped = await store.keys.wrap(key_name, plain, context)
    renewed = msgspec.structs.replace(stored, key_name=key_name, wrapped=wrapped)
    await store.put(data_key, [encode_descriptor(renewed)], if_absent=False)
    return True
