"""Topic configs that Kafka does not have, of the history in the object store and of records that expire."""

from __future__ import annotations

from typing import Final

from stratalog_metadata.topic_rules.config_keys import ConfigKey, ConfigKind

EXPIRY_HEADER: Final = "stratalog.record.expiry.header"
LOCK_MODE: Final = "stratalog.tier.lock.mode"
LOCK_MS: Final = "stratalog.tier.lock.ms"
NO_LOCK: Final = "none"
_MIB: Final = 1024 * 1024
_DAY_MS: Final = 24 * 3_600_000
_STORAGE_CLASSES: Final = (
    "STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR", "REDUCED_REDUNDANCY",
    "Hot", "Cool", "Cold",
    "NEARLINE", "COLDLINE", "ARCHIVE",
)  # fmt: skip
"""Those of S3, Azure (access tiers) and Google that can be read at once. Stores that lack one refuse the upload."""

TIER_TOPIC_CONFIGS: Final = (
    ConfigKey(
        name=EXPIRY_HEADER, kind=ConfigKind.STRING, default="",
        documentation="Name of the record header that says when a record expires, in ms since 1970 as decimal text. Compaction"
        " treats expired records as tombstones; brokers serve batches as they are. Empty: none expire.",
    ),
    ConfigKey(
        name="stratalog.tier.segment.bytes", kind=ConfigKind.LONG, default=str(256 * _MIB), minimum=64 * 1024,
        maximum=16_384 * _MIB,
        documentation="Size up to which neighbouring ledgers become one segment and small segments are merged. Not set:"
        " [tiering] segment_bytes.",
    ),
    ConfigKey(
        name="stratalog.tier.compression", kind=ConfigKind.STRING, default="none", choices=("none", "zstd"),
        documentation="Compression of new and merged segments in the object store, block by block. Clients read the batches as"
        " they were produced.",
    ),
    ConfigKey(
        name="stratalog.tier.compression.zstd.level", kind=ConfigKind.INT, default="3", minimum=1, maximum=19,
        documentation="Level of zstd: higher compresses better and slower.",
    ),
    ConfigKey(
        name="stratalog.tier.storage.class", kind=ConfigKind.STRING, default="STANDARD", choices=_STORAGE_CLASSES,
        documentation="Storage class of S3 or Google Cloud, or Azure's access tier, of new and merged segments. A store without"
        " classes has STANDARD only.",
    ),
    ConfigKey(
        name=LOCK_MODE, kind=ConfigKind.STRING, default=NO_LOCK, choices=(NO_LOCK, "governance", "compliance"),
        documentation="Object Lock of new segments and of the manifests that refer to them, in a bucket that has it. While"
        " objects are locked, retention keeps them, and DeleteTopics and DeleteRecords answer POLICY_VIOLATION.",
    ),
    ConfigKey(
        name=LOCK_MS, kind=ConfigKind.LONG, default="0", minimum=0, maximum=100 * 365 * _DAY_MS,
        documentation="How long a segment is locked, from its upload on; at most retention.ms. It needs a"
        f" {LOCK_MODE}. A merged segment is locked until the latest date of what it replaces.",
    ),
    ConfigKey(
        name="stratalog.tier.encryption.key", kind=ConfigKind.STRING, default="",
        documentation="Name of the key in the key ring of the store's URL that protects new and merged segments; empty: they"
        " are not encrypted.",
    ),
)  # fmt: skip
