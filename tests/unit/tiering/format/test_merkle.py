"""Merkle trees: known answers of RFC 9162's hashing, and proofs as a property."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.batch import assign_offset
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Invalid
from stratalog_tiering.format.merkle import TreeFrontier, batch_leaf, inclusion_proof, leaf_hash, proof_holds, root_hash


def test_an_empty_tree_hashes_to_the_hash_of_nothing() -> None:
    assert root_hash([]) == hashlib.sha256(b"").digest()


def test_known_answers_of_certificate_transparency() -> None:
    # Test vectors of the Certificate Transparency reference tree (the same hashing).
    inputs = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    leaves = [leaf_hash([bytes.fromhex(text)]) for text in inputs]
    assert root_hash(leaves[:1]).hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert root_hash(leaves).hex() == "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"


def test_a_leaf_may_come_in_pieces() -> None:
    assert leaf_hash([b"ab", memoryview(b"c")]) == leaf_hash([b"abc"])


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=40), st.data())
def test_every_leaf_is_proved_and_no_other_leaf_is(contents: list[bytes], data: st.DataObject) -> None:
    leaves = [leaf_hash([content]) for content in contents]
    index = data.draw(st.integers(0, len(leaves) - 1))
    proof, root = inclusion_proof(leaves, index), root_hash(leaves)
    assert proof_holds(root, leaves[index], index, len(leaves), proof)
    assert not proof_holds(root, leaf_hash([b"another leaf"]), index, len(leaves), proof)
    assert not proof_holds(root, leaves[index], len(leaves), len(leaves), proof)
    assert not proof_holds(root, leaves[index], index, len(leaves), (*proof, root))


def test_no_proof_outside_the_tree() -> None:
    with pytest.raises(IndexError):
        inclusion_proof([leaf_hash([b""])], 1)


@given(st.lists(st.binary(max_size=8), max_size=70), st.integers(0, 70))
def test_a_tree_grows_to_the_same_root(contents: list[bytes], stored_at: int) -> None:
    leaves = [leaf_hash([content]) for content in contents]
    tree = TreeFrontier()
    for count, leaf in enumerate(leaves):
        if count == stored_at:
            tree = TreeFrontier(tree.size, tree.peaks)
        tree.append(leaf)
        assert tree.root() == root_hash(leaves[: count + 1])
    assert (tree.size, tree.root()) == (len(leaves), root_hash(leaves))


def test_a_frontier_without_all_its_peaks_is_refused() -> None:
    with pytest.raises(Invalid, match="a tree of 3 leaves has 2 peaks, not 1"):
        TreeFrontier(3, [b"\0" * 32])


def test_a_batchs_leaf_is_over_base_offset_leader_epoch_and_the_hash_of_the_rest() -> None:
    batch = bytearray(build_batch([Record(offset=0, timestamp_ms=1, key=None, value=b"v")]))
    assign_offset(batch, 258, 7)
    rest = hashlib.sha256(batch[8:12] + batch[16:]).digest()
    offset_and_epoch = (258).to_bytes(8, "big") + (7).to_bytes(4, "big")
    assert batch_leaf(batch) == hashlib.sha256(b"\0" + offset_and_epoch + rest).digest()
