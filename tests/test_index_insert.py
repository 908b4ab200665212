"""Inserts: what is new, what was there, and the handle of a lookup."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ray.hashing import Namespace
from hicache_ray.index import IndexOptions, TieredIndex
from tests.index_kit import Kit, evict


def test_duplicates_are_the_callers_to_free() -> None:
    kit = Kit(page=2)
    kit.put(1, 2, 3, 4)
    pages = kit.index.device.alloc(3)
    assert pages is not None
    inserted = kit.index.insert(kit.key([1, 2, 3, 4, 5, 6]), pages)
    assert inserted.prefix_pages == 2 and kit.tokens(inserted.node) == [5, 6]
    assert inserted.node.value is not None and inserted.node.value.tolist() == pages[2:].tolist()
    kit.index.device.free(pages[:2])
    kit.settle()
    kit.check()


def test_recomputed_pages_bring_a_host_only_node_back() -> None:
    """Case 21. Its host copy is kept, nothing counts as prefix, and no hit is counted."""
    kit = Kit()
    node = kit.put(1, 2, 3)
    evict(kit.index, 3)
    host = node.host_value
    inserted = kit.insert([1, 2, 3])
    assert inserted.prefix_pages == 0 and inserted.node is node
    assert node.value is not None and node.host_value is host and node.hit_count == 1
    assert not kit.index.transfers.writes
    kit.check()


def test_a_host_only_node_comes_back_in_part() -> None:
    """The part that was recomputed is split off and is on both tiers; the rest stays on the host."""
    kit = Kit()
    kit.put(1, 2, 3, 4)
    evict(kit.index, 4)
    kit.insert([1, 2, 9])
    assert kit.tree() == [(0, [1, 2], "DH"), (2, [3, 4], "H"), (2, [9], "DH")]
    kit.settle()
    kit.check()


def test_an_insert_continues_from_its_lookup() -> None:
    kit = Kit()
    kit.put(1, 2, 3)
    match = kit.match([1, 2, 3, 4])
    kit.index.tree.lock(match.device_node)
    kit.put(1, 2, 9)  # splits the matched node meanwhile
    kit.put(1, 2, 3, 4, 7)  # and extends it
    pages = kit.index.allocate(2)
    assert pages is not None
    inserted = kit.index.insert(kit.key([1, 2, 3, 4, 5]), pages, match=match)
    assert inserted.prefix_pages == 4
    kit.index.device.free(pages[:1])
    kit.index.tree.unlock(match.device_node)
    kit.settle()
    assert kit.hit([1, 2, 3, 4, 5]) == (5, 0) and kit.hit([1, 2, 3, 4, 7]) == (5, 0)
    kit.check()


def test_a_handle_that_no_longer_holds_is_not_used() -> None:
    """The node was evicted, the tree flushed, or the handle is another key's: the walk begins at the root."""
    kit = Kit(host=0)
    kit.put(1, 2, 3)
    match = kit.match([1, 2, 3])
    evict(kit.index, 3)
    assert kit.insert([1, 2, 3, 4], match=match).prefix_pages == 0
    match = kit.match([1, 2, 3, 4])
    kit.index.flush()
    assert kit.insert([1, 2, 3, 4], match=match).prefix_pages == 0
    match = kit.match([1, 2, 3, 4])
    assert kit.insert([1, 2, 8, 9], match=match).prefix_pages == 2
    assert kit.insert([1, 2, 3, 4], Namespace(adapter="a"), match=match).prefix_pages == 0
    assert kit.hit([1, 2, 8, 9]) == (4, 0)
    kit.check()


def test_pages_must_reach_back_to_what_is_on_the_device() -> None:
    kit = Kit()
    kit.put(1, 2)
    pages = kit.index.device.alloc(3)
    assert pages is not None
    with pytest.raises(ValueError, match="1 pages given for a key of 4, of which 2 are on the device"):
        kit.index.insert(kit.key([1, 2, 3, 4]), pages[:1])
    with pytest.raises(ValueError, match="3 pages given for a key of 2"):
        kit.index.insert(kit.key([1, 2]), pages)
    assert kit.index.insert(kit.key([1, 2, 3, 4]), pages[:2]).prefix_pages == 2
    kit.index.device.free(pages[2:])
    kit.settle()
    kit.check()


def test_the_tree_keeps_its_own_copy_of_the_pages() -> None:
    kit = Kit(host=0)
    pages = kit.index.device.alloc(2)
    assert pages is not None
    node = kit.index.insert(kit.key([1, 2]), pages).node
    pages[:] = 63
    assert node.value is not None and node.value.tolist() == [0, 1]


def test_an_empty_key() -> None:
    kit = Kit(page=4)
    inserted = kit.index.insert(kit.key([1, 2]), np.empty(0, dtype=np.int64))
    assert inserted == (0, kit.index.tree.root)
    match = kit.match([])
    assert (match.device_pages, match.host_pages) == (0, 0)
    assert len(kit.index.device_value(match)) == 0
    kit.check()


def test_allocate_evicts_only_the_shortfall() -> None:
    kit = Kit(device=8, host=0)
    for token in range(4):
        kit.put(token, token)
    assert kit.index.allocate(1) is not None
    assert [tokens for _, tokens, _ in kit.tree()] == [[1, 1], [2, 2], [3, 3]]


def test_allocate_evicts_nothing_when_it_cannot_succeed() -> None:
    kit = Kit(device=8, host=0)
    kit.put(1, 1)
    node = kit.put(2, 2, 2, 2)
    kit.index.tree.lock(node)
    assert kit.index.allocate(5) is None
    assert kit.hit([1, 1]) == (2, 0)
    assert kit.index.allocate(4) is not None


def test_a_match_that_was_evicted_has_no_pages_to_show() -> None:
    kit = Kit(host=0)
    kit.put(1, 2)
    match = kit.match([1, 2])
    evict(kit.index, 2)
    with pytest.raises(ValueError, match="was evicted since the match"):
        kit.index.device_value(match)


def test_unknown_write_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="'sometimes' is unknown; give one of write_through, write_through_selective"):
        TieredIndex(IndexOptions(page_size=1, device_pages=1, host_pages=1, write_policy="sometimes"))
