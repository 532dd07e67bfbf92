"""The partition's tree: heads and proofs equal RFC 9162's definition, however the leaves arrive, and hold as the tree grows."""

from __future__ import annotations

import itertools
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_core.errors import Corrupt, Invalid
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.merkle import inclusion_proof, leaf_hash, proof_holds, root_hash
from stratalog_tiering.format.partition_tree import (
    EMPTY_TREE,
    PartitionTree,
    TreePage,
    TreeProofs,
    check_tree,
    consistency_holds,
    decode_tree_page,
)
from stratalog_tiering.format.tree_edit import TreeEdit

TOPIC = UUID(int=1)
LIMITS = ManifestLimits(page_fan_in=3, inline_spans_max=2)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=25)


class Grown:
    """A tree that edits have grown, one offload of so many leaves each, and every head that it had."""

    def __init__(self, counts: list[int]) -> None:
        numbers = itertools.count()
        self.tree: PartitionTree = EMPTY_TREE
        self.stored: dict[str, TreePage] = {}
        self.leaves: list[bytes] = []
        self.heads: dict[int, bytes] = {}
        self.offloads: list[tuple[int, int]] = []
        """First leaf and end of each offload."""
        for count in counts:
            added = [leaf_hash((b"%d" % number,)) for number in range(len(self.leaves), len(self.leaves) + count)]
            edit = TreeEdit(self.tree, TOPIC, 0, lambda: next(numbers), LIMITS)
            edit.append(b"".join(added))
            edit.move_to_pages({ref.key: self.stored[ref.key] for ref in edit.pages_to_merge()})
            self.tree = edit.finish()
            made = {ref.key: ref.sha256 for ref in self.tree.pages}
            self.stored.update({key: decode_tree_page(content, made[key]) for key, content in edit.new_pages() if key in made})
            self.offloads.append((len(self.leaves), len(self.leaves) + count))
            self.leaves += added
            self.heads[len(self.leaves)] = self.tree.head

    def proofs(self) -> TreeProofs:
        return TreeProofs(self.tree, self.stored)


@settings(max_examples=60)
@given(sizes)
def test_the_head_is_the_root_over_all_leaves(counts: list[int]) -> None:
    grown = Grown(counts)
    for size, head in grown.heads.items():
        assert head == root_hash(grown.leaves[:size]) == grown.proofs().head(size)
    check_tree(grown.tree)
    assert len(grown.tree.spans) <= LIMITS.inline_spans_max
    assert len(grown.tree.pages) <= 3 * 4


@settings(max_examples=60)
@given(sizes, st.data())
def test_every_batch_is_proved_from_the_leaves_of_its_segment_alone(counts: list[int], data: st.DataObject) -> None:
    """A merged segment holds the leaves of several offloads."""
    grown, proofs = Grown(counts), None
    first = data.draw(st.integers(0, len(counts) - 1))
    last = data.draw(st.integers(first, len(counts) - 1))
    start, end = grown.offloads[first][0], grown.offloads[last][1]
    proofs = grown.proofs()
    proofs.replace(start, grown.leaves[start:end])
    for size in (size for size in grown.heads if size >= end):
        for index in range(start, end):
            proof = proofs.inclusion(index, size)
            assert proof == inclusion_proof(grown.leaves[:size], index)
            assert proof_holds(grown.heads[size], grown.leaves[index], index, size, proof)


@settings(max_examples=60)
@given(sizes)
def test_every_head_is_proved_to_be_a_prefix_of_every_later_one(counts: list[int]) -> None:
    grown = Grown(counts)
    proofs = grown.proofs()
    for older, newer in itertools.combinations_with_replacement(grown.heads, 2):
        proof = proofs.consistency(older, newer)
        assert consistency_holds(older, grown.heads[older], newer, grown.heads[newer], proof)
        other = leaf_hash((b"other",))
        assert not consistency_holds(older, other, newer, grown.heads[newer], proof)
        assert not consistency_holds(older, grown.heads[older], newer, other, proof)
        for place in range(len(proof)):
            wrong = (*proof[:place], other, *proof[place + 1 :])
            assert not consistency_holds(older, grown.heads[older], newer, grown.heads[newer], wrong)


def test_foreign_leaves_are_refused() -> None:
    grown = Grown([3, 4])
    with pytest.raises(Corrupt, match=r"leaves 0\.\.2 are not those of the partition's tree"):
        grown.proofs().replace(0, [grown.leaves[0], grown.leaves[2], grown.leaves[1]])
    with pytest.raises(Corrupt, match=r"leaves 3\.\.4 are not"):
        grown.proofs().replace(3, grown.leaves[3:5])


def test_unknown_leaves_and_sizes_are_refused() -> None:
    grown = Grown([3, 4])
    for index, size in ((7, 7), (-1, 7), (0, 8)):
        with pytest.raises(Invalid):
            grown.proofs().inclusion(index, size)
    with pytest.raises(Invalid, match="load their segment's leaves"):
        grown.proofs().inclusion(0, 7)
    with pytest.raises(Invalid, match="no proof between 3 and 8 leaves"):
        grown.proofs().consistency(3, 8)


@pytest.mark.parametrize(("member", "value"), [("size", 6), ("head", bytes(32)), ("spans", ())])
def test_a_tree_that_contradicts_itself_is_found(member: str, value: object) -> None:
    grown = Grown([3, 4])
    wrong = msgspec.structs.replace(grown.tree, **{member: value})
    with pytest.raises(Corrupt, match="the tree's head is not that of"):
        check_tree(wrong)
