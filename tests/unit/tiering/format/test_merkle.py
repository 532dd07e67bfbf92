"""Merkle trees: known answers of RFC 9162's hashing, and proofs as a property."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.format.merkle import inclusion_proof, leaf_hash, proof_holds, root_hash


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
