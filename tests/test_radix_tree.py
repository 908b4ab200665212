"""The tree's own promises: locks, protections, digest, and that it notices wrong use."""

from __future__ import annotations

import pytest

from hicache_ray.index.integrity import check_index
from hicache_ray.radix.digest import Digest
from hicache_ray.radix.integrity import check_tree
from hicache_ray.radix.tree import LockError
from tests.index_kit import Kit, evict, evict_host
from tests.index_pair import digest_from_scratch, path_locks


def test_locks_reach_up_to_the_root() -> None:
    kit = Kit()
    upper = kit.put(1, 2)
    lower = kit.put(1, 2, 3)
    tree = kit.index.tree
    kit.index.tree.lock(lower)
    kit.index.tree.lock(upper)
    assert (path_locks(upper), path_locks(lower)) == (2, 1)
    assert (tree.evictable_pages, tree.protected_pages) == (0, 3)
    kit.index.tree.unlock(lower)
    assert (tree.evictable_pages, tree.protected_pages) == (1, 2)
    kit.index.tree.unlock(upper)
    assert (tree.evictable_pages, tree.protected_pages) == (3, 0)


def test_a_lock_held_over_a_split_is_given_back_in_one_piece() -> None:
    kit = Kit()
    node = kit.put(1, 2, 3, 4)
    kit.index.tree.lock(node)
    kit.match([1, 2, 9])
    assert evict(kit.index, 4) == 0
    kit.index.tree.unlock(node)
    assert evict(kit.index, 4) == 4


def test_a_lock_on_a_host_only_node_keeps_it_on_the_host() -> None:
    """It is a candidate again at the unlock, even while its ancestors stay locked."""
    kit = Kit()
    upper, lower = kit.put(1, 2), kit.put(1, 2, 3)
    kit.index.tree.lock(upper)
    evict(kit.index, 1)
    kit.index.tree.lock(lower)
    assert evict_host(kit.index, 1) == 0
    kit.index.tree.unlock(lower)
    check_index(kit.index)
    assert evict_host(kit.index, 1) == 1


def test_giving_back_what_is_not_held_is_an_error() -> None:
    """Case 36. An unlock or a release too many raises, and changes nothing."""
    kit = Kit()
    node = kit.put(1, 2)
    with pytest.raises(LockError, match="has no lock to give back"):
        kit.index.tree.unlock(node)
    with pytest.raises(LockError, match="is not protected"):
        kit.index.tree.release(node)
    evict(kit.index, 2)
    evict_host(kit.index, 2)
    with pytest.raises(LockError, match="no longer in the tree"):
        kit.index.tree.lock(node)
    with pytest.raises(LockError, match="no longer in the tree"):
        kit.index.tree.protect(node)
    kit.check()


def test_the_root_may_be_locked_and_protected() -> None:
    kit = Kit()
    root = kit.index.tree.root
    kit.index.tree.lock(root)
    kit.index.tree.unlock(root)
    kit.index.tree.protect(root)
    kit.index.tree.release(root)
    kit.check()


def test_the_digest_tells_states_apart() -> None:
    kit = Kit()
    seen = {kit.index.tree.digest()}
    node = kit.insert([1, 2, 3]).node
    changes = (
        lambda: kit.settle(),
        lambda: kit.match([1, 2, 3]),
        lambda: kit.index.tree.lock(node),
        lambda: kit.index.tree.unlock(node),
        lambda: kit.index.tree.protect(node),
        lambda: kit.insert([1, 2, 9], priority=3),
        lambda: kit.settle(),
        lambda: evict(kit.index, 1),
        lambda: kit.index.tree.release(node),
        lambda: evict_host(kit.index, 1),
    )
    for number, change in enumerate(changes):
        change()
        # A lock that was given back leaves the state of before.
        assert (kit.index.tree.digest() in seen) == (number == 3)
        seen.add(kit.index.tree.digest())
        assert kit.index.tree.digest() == digest_from_scratch(kit.index)


def test_equal_calls_give_equal_digests_whenever_they_are_asked_for() -> None:
    often, once = Kit(), Kit()
    for kit in (often, once):
        for tokens in ([1, 2, 3, 4], [1, 2, 5], [7], [1, 2, 3, 4, 6]):
            kit.put(*tokens)
            if kit is often:
                kit.index.tree.digest()
        evict(kit.index, 3)
    assert often.index.tree.digest() == once.index.tree.digest()


def test_notes_for_the_digest_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digest, "MAX_NOTES", 8)
    kit = Kit(host=0)
    kit.index.tree.digest()
    for number in range(100):
        kit.put(number % 5, number % 3)
        evict(kit.index, number % 3)
        notes = kit.index.tree._digest.notes
        assert notes is not None and len(notes) < 20
    assert kit.index.tree.digest() == digest_from_scratch(kit.index)


def test_the_audit_notices_damage() -> None:
    kit = Kit()
    node = kit.put(1, 2, 3)
    check_tree(kit.index.tree)
    node.hit_count += 1
    kit.index.tree.digest()
    node.hit_count += 1
    with pytest.raises(AssertionError, match="digest"):
        check_tree(kit.index.tree)
    kit.index.tree.note(node)
    check_tree(kit.index.tree)
    kit.index.tree.evictable_pages += 1
    with pytest.raises(AssertionError, match="evictable_pages is 4, the nodes make 3"):
        check_tree(kit.index.tree)
