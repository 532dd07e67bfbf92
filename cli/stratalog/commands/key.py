"""``stratalog key …``: creates and rotates the keys that encrypt history. Uses a key directory and the store, no broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from stratalog.command_group import CommandGroup
from stratalog.output import json_option, print_done, print_json, print_rows, progress_bar
from stratalog.target import second_store_of, store_of, store_options
from stratalog.tier.history import ColdPartition, cold_partitions
from stratalog.tier.session import store_session
from stratalog_core.errors import Invalid, NotFound
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.offload.data_keys import rewrap, rewrap_topic
from stratalog_tiering.store import ObjectStore
from stratalog_tiering.store.key_ring import KEY_NAME, create_key, key_names

_keys_option = click.option(
    "--keys",
    "directory",
    required=True,
    envvar="STRATALOG_KEYS",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the keys, one file each.",
)


@click.group(cls=CommandGroup)
def key() -> None:
    """Create and rotate the keys of encrypted history.

    A topic's segments are encrypted if its config stratalog.tier.encryption.key names a key of the key ring, which is the
    directory in the option `keys` of the store's URL: /bucket?keys=/etc/stratalog/keys, or s3://bucket?…&keys=/etc/stratalog/keys.
    """


@key.command()
@click.argument("name")
@_keys_option
@json_option
def create(name: str, directory: Path, as_json: bool) -> None:
    """Create the key NAME. Copy it to every machine that reads the history, and back it up: without it nothing can be read."""
    path = create_key(directory, name)
    sentence = f"{path}: back it up; without it, the history that it encrypts is lost"
    print_done({"key": name, "file": str(path)}, sentence, as_json=as_json)


@key.command("list")
@_keys_option
@json_option
def list_keys(directory: Path, as_json: bool) -> None:
    """List the keys in a directory."""
    if not directory.is_dir():
        raise NotFound(f"{directory} is not a directory: give the directory of the keys")
    names = key_names(directory)
    if as_json:
        print_json({"keys": names})
    else:
        print_rows([{"key": name} for name in names], ("key",))


@key.command()
@click.argument("topics", nargs=-1, required=True)
@click.option("--to", "name", required=True, metavar="NAME", help="Name of the new key.")
@click.option(
    "--copy", metavar="URL", help="Store of the second copy, where the key is rotated, too (default: that of --data)."
)
@store_options
@json_option
def rotate(
    topics: tuple[str, ...], name: str, copy: str | None, data: Path | None, store: str | None, as_json: bool
) -> None:  # fmt: skip
    """Wrap the data keys of TOPICS with another key. Rewrites the small objects that hold data keys, not the segments.

    The key rings of the stores need both keys. Set stratalog.tier.encryption.key of the topics first, so that new segments use
    the new key, too. The old key is no longer needed once a rotation that started after that has ended. If the command fails,
    repeat it.
    """
    if KEY_NAME.fullmatch(name) is None:
        raise Invalid(f"key name {name!r} is invalid; use 1 to 64 letters, digits and ._-")
    second = copy or second_store_of(data, store)
    rewrapped, unencrypted, in_copy = asyncio.run(_rotate(store_of(data, store), second, topics, name))
    counts: dict[str, object] = {
        "topics": list(topics), "key": name, "rewrapped": rewrapped, "unencrypted_segments": unencrypted
    }  # fmt: skip
    sentence = f"{rewrapped} data keys are now protected by {name}"
    if second is not None:
        counts["rewrapped_in_copy"] = in_copy
        sentence += f", and {in_copy} of the second copy"
    if unencrypted:
        sentence += f"; {unencrypted} segments are not encrypted"
    print_done(counts, sentence, as_json=as_json)


async def _rotate(url: str, second_url: str | None, topics: tuple[str, ...], name: str) -> tuple[int, int, int]:
    """Return the numbers of rewrapped data keys, of unencrypted segments, and of rewrapped data keys in the second copy."""
    async with store_session(url) as store:
        await store.keys.make(name, b"")  # There must be such a key.
        partitions = await cold_partitions(store, (), topics)
        counts = [0, 0]
        with progress_bar() as progress:
            task = progress.add_task("rotating partitions", total=len(partitions))
            for partition in partitions:
                found = await _rotate_partition(store, partition, name)
                counts = [counts[0] + found[0], counts[1] + found[1]]
                progress.advance(task)
        topic_ids = sorted({(await Archive(store).topic(topic)).topic_id for topic in topics})
        # Workers may have committed a version that is not in the bucket yet, and readers may still read what was replaced.
        counts[0] += sum([await rewrap_topic(store, topic_id, name, passes_over=True) for topic_id in topic_ids])
    in_copy = 0
    if second_url is not None:
        # After the first store: data keys that are copied now have the new key, or this rotation finds them.
        async with store_session(second_url) as second:
            in_copy = sum([await rewrap_topic(second, topic_id, name) for topic_id in topic_ids])
    return counts[0], counts[1], in_copy


async def _rotate_partition(store: ObjectStore, partition: ColdPartition, name: str) -> tuple[int, int]:
    """Return the numbers of rewrapped data keys and of unencrypted segments."""
    archive, source, rewrapped, unencrypted = Archive(store), ManifestSource(store), 0, 0
    async for entry in archive.segments(await archive.manifest(partition.pointer)):
        footer = await source.footer(entry)
        if not footer.is_encrypted:
            unencrypted += 1
        elif await rewrap(store, footer.data_key, name):
            rewrapped += 1
    return rewrapped, unencrypted
