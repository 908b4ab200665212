"""Lookups: where a key leaves the tree, and the splits that follow."""

from __future__ import annotations

import pytest

from hicache_ray.hashing import Namespace, page_hashes
from tests.index_kit import Kit, evict
from tests.index_pair import path_locks


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], 0),
        (list(range(3)), 0),
        (list(range(4)), 4),
        (list(range(7)), 4),
        (list(range(8)), 8),
        (list(range(11)), 8),
        ([9, 1, 2, 3, 4, 5, 6, 7], 0),
        ([0, 1, 2, 3, 4, 5, 6, 99], 4),
    ],
)
def test_lookups_end_at_page_boundaries(tokens: list[int], found: int) -> None:
    """Case 14."""
    kit = Kit(page=4)
    kit.put(*range(8))
    assert kit.hit(tokens) == (found, 0)
    assert kit.match(tokens).device_pages * 4 == found


def test_a_lookup_splits_once() -> None:
    """Case 15. The same query again finds the same node and splits nothing."""
    kit = Kit(page=2)
    kit.put(1, 2, 3, 4, 5, 6)
    first = kit.match([1, 2, 3, 4, 9, 9])
    second = kit.match([1, 2, 3, 4, 9, 9])
    assert first.node is second.node and kit.index.tree.splits == 1
    assert kit.tree() == [(0, [1, 2, 3, 4], "DH"), (4, [5, 6], "DH")]


def test_peek_has_no_effect() -> None:
    kit = Kit(page=2)
    kit.put(1, 2, 3, 4, 5, 6)
    digest = kit.index.tree.digest()
    assert kit.hit([1, 2, 3, 4, 9, 9]) == (4, 0)
    assert kit.index.tree.digest() == digest and kit.index.tree.splits == 0


def test_a_split_carries_everything() -> None:
    """Case 16. Pages of both tiers, hashes, hit count and lock on both halves; the lower half stays the node it was."""
    kit = Kit(page=2, hash_pages=True)
    node = kit.put(*range(1, 9))
    device, host = node.value, node.host_value
    assert device is not None and host is not None
    seq, creation = node.seq, node.creation
    kit.index.tree.lock(node)
    upper = kit.match([1, 2, 3, 4, 9, 9]).node
    assert node.parent is upper and kit.tokens(upper) == [1, 2, 3, 4] and kit.tokens(node) == [5, 6, 7, 8]
    for half, part in ((upper, slice(0, 2)), (node, slice(2, 4))):
        assert half.value is not None and half.value.tolist() == device[part].tolist()
        assert half.host_value is not None and half.host_value.tolist() == host[part].tolist()
        assert half.hash_value == page_hashes(kit.key(list(range(1, 9))).units, 2)[part]
        assert (half.hit_count, path_locks(half)) == (1, 1)
    assert (node.seq, node.creation) == (seq, creation)
    assert upper.seq > seq and upper.creation > creation
    kit.index.tree.unlock(node)
    assert (path_locks(upper), path_locks(node)) == (0, 0)
    kit.check()


def test_a_lookup_counts_no_hit() -> None:
    """Case 17. Only inserts count."""
    kit = Kit()
    node = kit.put(1, 2, 3)
    kit.match([1, 2, 3])
    assert node.hit_count == 1
    kit.insert([1, 2, 3])
    assert node.hit_count == 2


def test_what_only_the_host_has_is_found_there() -> None:
    """Case 18. Of [1..4] and [5, 6], both evicted, only the first has a host copy."""
    kit = Kit(write_policy="write_through_selective")
    kit.put(1, 2, 3, 4)
    kit.put(1, 2, 3, 4, 5, 6)
    evict(kit.index, 6)
    match = kit.match([1, 2, 3, 4, 5, 6])
    assert (match.device_pages, match.host_pages) == (0, 4)
    assert match.device_node is kit.index.tree.root and kit.tokens(match.host_node) == [1, 2, 3, 4]


def test_namespaces_share_nothing() -> None:
    """Case 19. Not even on the way down: the same tokens live in two subtrees."""
    kit = Kit()
    a, b = Namespace(adapter="a"), Namespace(adapter="b")
    kit.insert([1, 2, 3, 4], a)
    assert kit.hit([1, 2, 3, 4]) == (0, 0)
    assert kit.hit([1, 2, 3, 4], a) == (4, 0)
    assert kit.hit([1, 2, 3, 4], b) == (0, 0)
    kit.insert([1, 2, 9], b)
    kit.insert([1, 2, 8])
    assert (kit.hit([1, 2, 9], a)[0], kit.hit([1, 2, 9], b)[0], kit.hit([1, 2, 9])[0]) == (2, 3, 2)
    kit.settle()
    kit.check()


def test_unaligned_input_is_cut_everywhere() -> None:
    """Case 20. Insert, lookup and write of six tokens at page 4 concern one page."""
    kit = Kit(page=4)
    kit.put(*range(6))
    assert kit.tree() == [(0, [0, 1, 2, 3], "DH")]
    kit.check()


def test_the_rest_of_a_split_node_is_refreshed_or_not() -> None:
    """What a lookup cuts off becomes recent as in the recorded traces, or stays as old as it is."""
    for refresh, order in ((True, [[7, 8], [3, 4], [1, 2]]), (False, [[3, 4], [7, 8], [1, 2]])):
        kit = Kit(host=0, refresh_remainder=refresh)
        kit.put(1, 2, 3, 4)
        kit.put(7, 8)
        kit.match([1, 2])
        assert kit.evict_order() == order
