"""Pages from L3: room for them, and their place in the tree."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ray.hashing import page_hashes
from hicache_ray.pages import Pages
from tests.index_kit import Kit, evict, evict_host


def attach(kit: Kit, tokens: list[int], anchor_pages: int) -> Pages:
    """Attaches new host pages for the tokens beyond the anchor; frees and returns what was not used."""
    key = kit.key(tokens)
    pages = kit.index.allocate_host(key.pages - anchor_pages)
    assert pages is not None
    unused = kit.index.attach_host(key, anchor_pages, pages, page_hashes(key.units, kit.page)[anchor_pages:])
    kit.index.host.free(unused)
    return unused


def test_completed_pages_become_host_only_nodes() -> None:
    """Case 41. Ten tokens asked for, eight there: eight attached, all others come back, the anchor is free again."""
    kit = Kit(page=2, hash_pages=True)
    anchor = kit.index.tree.root
    kit.index.tree.protect(anchor)
    assert len(attach(kit, list(range(8)), 0)) == 0
    kit.index.tree.release(anchor)
    assert kit.tree() == [(0, list(range(8)), "H")]
    assert kit.index.host.free_pages == 32 - 4 and kit.index.stats.attached_pages == 4
    kit.check()


def test_pages_that_are_there_already_are_given_back() -> None:
    kit = Kit(page=2)
    kit.put(1, 2, 3, 4)
    unused = attach(kit, [1, 2, 3, 4, 5, 6, 7, 8], 1)
    assert len(unused) == 1
    assert kit.tree() == [(0, [1, 2, 3, 4], "DH"), (4, [5, 6, 7, 8], "H")]
    assert len(attach(kit, [1, 2, 3, 4, 5, 6], 2)) == 1
    kit.check()


def test_pages_may_branch_off_inside_a_node() -> None:
    kit = Kit(page=2)
    kit.put(1, 2, 3, 4)
    assert len(attach(kit, [1, 2, 8, 8], 1)) == 0
    assert kit.tree() == [(0, [1, 2], "DH"), (2, [3, 4], "DH"), (2, [8, 8], "H")]
    kit.check()


def test_no_host_only_node_below_one_without_a_host_copy() -> None:
    """D2. A device-only node came into the prefetched range meanwhile: the pages are given back."""
    kit = Kit(page=2)
    kit.insert([1, 2, 3, 4], chunked=True)
    assert len(attach(kit, [1, 2, 3, 4, 5, 6], 0)) == 3
    assert kit.tree() == [(0, [1, 2, 3, 4], "D")]
    assert kit.index.stats.refused_attachments == 3
    kit.check()


def test_pages_whose_prefix_is_gone_are_given_back() -> None:
    kit = Kit(page=2)
    assert len(attach(kit, [1, 2, 3, 4], 1)) == 1
    assert kit.tree() == []
    kit.check()


def test_an_anchor_is_the_deepest_node_with_a_host_copy() -> None:
    """Case 53. The root counts as having one; a prefetch may begin where it is also the deepest node on the device."""
    kit = Kit(write_policy="write_through_selective")
    match = kit.match([1, 2])
    assert match.host_node is match.device_node is kit.index.tree.root
    kit.put(1, 2)
    assert kit.match([1, 2]).host_node is kit.index.tree.root
    node = kit.put(1, 2)
    assert kit.match([1, 2, 3]).host_node is node


def test_a_protected_anchor_stays_through_splits_and_evictions() -> None:
    """Cases 41 and 53. Its host copy, and that of all above it, is kept until the release."""
    kit = Kit(page=2)
    anchor = kit.put(1, 2, 3, 4)
    kit.index.tree.protect(anchor)
    kit.match([1, 2, 9, 9])
    evict(kit.index, 4)
    assert evict_host(kit.index, 4) == 0
    assert len(attach(kit, [1, 2, 3, 4, 5, 6], 2)) == 0
    kit.index.tree.release(anchor)
    assert evict_host(kit.index, 6) == 6
    kit.check()


def test_room_for_a_prefetch_costs_only_the_shortfall() -> None:
    """Cases 41, 42, 45. Two pages short: one node of two pages goes, not as many as are asked for."""
    kit = Kit(device=8, host=8)
    for token in range(4):
        kit.put(token, token)
    evict(kit.index, 8)
    pages = kit.index.allocate_host(2)
    assert pages is not None and [tokens for _, tokens, _ in kit.tree()] == [[1, 1], [2, 2], [3, 3]]
    assert kit.index.allocate_host(9) is None
    kit.index.host.free(pages)
    kit.check()


def test_a_mismatch_of_numbers_is_refused() -> None:
    kit = Kit(page=2)
    with pytest.raises(ValueError, match="1 pages and 0 hashes for pages 0 to 1 of a key"):
        kit.index.attach_host(kit.key([1, 2]), 0, np.zeros(1, dtype=np.int64), [])
