"""L1 to L2: when a node is written, what holds meanwhile, and what a split changes about it."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ray.hashing import page_hashes
from tests.index_kit import Kit, evict, evict_host


@pytest.mark.parametrize(
    ("policy", "chunked", "backed_after", "hits"),
    [
        ("write_through", False, 1, 3),
        ("write_through_selective", False, 2, 3),
        ("write_back", False, None, 0),
        ("write_through", True, None, 0),
        ("write_through_selective", True, None, 0),
    ],
)
def test_hits_until_a_node_is_written(policy: str, chunked: bool, backed_after: int | None, hits: int) -> None:
    """Case 22. Three identical inserts."""
    kit = Kit(write_policy=policy)
    backed = None
    for number in (1, 2, 3):
        node = kit.insert([1, 2, 3], chunked=chunked).node
        kit.settle()
        if node.backuped and backed is None:
            backed = number
    assert (backed, node.hit_count) == (backed_after, hits)
    kit.check()


def test_hits_are_counted_along_the_path() -> None:
    """Case 23."""
    kit = Kit(write_policy="write_through_selective")
    upper = kit.insert([1, 2]).node
    lower = kit.insert([1, 2, 3]).node
    assert (upper.hit_count, upper.backuped, lower.hit_count, lower.backuped) == (2, True, 1, False)
    kit.insert([1, 2, 3, 4])
    assert lower.backuped


def test_a_write_in_flight_is_locked() -> None:
    """Case 24. Before the acknowledgement nothing can be evicted; after it the node becomes host-only."""
    kit = Kit()
    kit.insert([1, 2, 3])
    tree = kit.index.tree
    assert (tree.evictable_pages, tree.protected_pages, evict(kit.index, 3)) == (0, 3, 0)
    kit.index.transfers.acknowledge_writes(1)
    assert (tree.evictable_pages, tree.protected_pages, evict(kit.index, 3)) == (3, 0, 3)
    assert kit.tree() == [(0, [1, 2, 3], "H")]


def test_writes_end_in_order() -> None:
    """Case 25. The oldest first, and no more than are in flight."""
    kit = Kit()
    first, second = kit.insert([1]).node, kit.insert([2]).node
    assert [write.node for write in kit.index.transfers.writes] == [first, second]
    assert [write.node for write in kit.index.transfers.acknowledge_writes(1)] == [first]
    with pytest.raises(ValueError, match="2 writes acknowledged, but 1 are in flight"):
        kit.index.transfers.acknowledge_writes(2)
    assert [write.node for write in kit.index.transfers.acknowledge_writes(1)] == [second]
    assert kit.index.transfers.acknowledge_writes(0) == []


def test_transfers_are_handed_out_once_in_order() -> None:
    kit = Kit()
    kit.put(1, 2)
    evict(kit.index, 2)
    kit.insert([3])
    kit.index.load_back(kit.match([1, 2]))
    kinds = [type(transfer).__name__ for transfer in kit.index.transfers.take_issued()]
    assert kinds == ["Write", "Load"] and kit.index.transfers.take_issued() == []


def test_a_full_host_makes_room_for_a_write() -> None:
    """Case 27. What is on both tiers stays; a host-only leaf goes."""
    kit = Kit(device=8, host=9)
    for token in range(4):
        kit.put(token, token)
    assert evict_host(kit.index, 4) == 0
    evict(kit.index, 2)
    kit.put(9, 9)
    assert kit.hit([0, 0]) == (0, 0) and kit.hit([9, 9]) == (2, 0)
    assert all(tiers == "DH" for _, _, tiers in kit.tree())
    kit.check()


def test_a_write_that_finds_no_room_is_left_out() -> None:
    kit = Kit(device=8, host=2)
    kit.put(1, 2)
    node = kit.put(3, 4)
    assert not node.backuped and kit.index.stats.refused_writes == 1
    evict(kit.index, 2)
    kit.put(3, 4)
    assert node.backuped
    kit.check()


def test_nothing_is_written_below_a_node_without_a_host_copy() -> None:
    """It could be left unreachable: the upper node would go with all that hangs below it."""
    kit = Kit(device=16, host=3)
    kit.put(1, 2, 3, 4)
    lower = kit.put(1, 2, 3, 4, 5)
    assert not lower.backuped
    kit.check()


def test_every_write_may_go_on_to_l3() -> None:
    """Case 28. There is no further threshold: four pages written to L2 are four pages backed up."""
    kit = Kit(hash_pages=True)
    kit.insert([1, 2, 3, 4])
    (write,) = kit.index.transfers.acknowledge_writes(1)
    (backup,) = kit.index.transfers.begin_backups(write)
    assert backup.hashes == page_hashes(kit.key([1, 2, 3, 4]).units, 1) and backup.prefix_hashes == []
    assert backup.host_pages.tolist() == write.host_pages.tolist()
    kit.index.transfers.acknowledge_backups(1)
    kit.check()


def written_then_split(**options: Any) -> tuple[Kit, Any]:
    kit = Kit(page=2, hash_pages=True, **options)
    node = kit.insert([1, 2, 3, 4, 5, 6]).node
    kit.insert([1, 2, 9, 9])
    assert kit.tokens(node) == [3, 4, 5, 6] and node.parent is not None
    return kit, node


def test_a_split_during_a_write_changes_nothing_about_the_write() -> None:
    """D1. Both halves are locked until the acknowledgement, and the write still names all three pages."""
    kit, node = written_then_split()
    write = kit.index.transfers.writes[0]
    assert (write.start, len(write.device_pages), len(write.host_pages)) == (0, 3, 3)
    assert write.hashes == page_hashes(kit.key([1, 2, 3, 4, 5, 6]).units, 2)
    assert node.locked and node.parent.locked
    assert evict(kit.index, 6) == 0
    kit.settle()
    assert not node.locked and not node.parent.locked
    kit.check()


def test_every_backed_up_page_has_its_ancestors_backed_up() -> None:
    """D1. After the split both halves reach L3, the first page before the others."""
    kit, _ = written_then_split()
    stored: set[bytes] = set()
    for write in kit.index.transfers.acknowledge_writes(2):
        for backup in kit.index.transfers.begin_backups(write):
            assert set(backup.prefix_hashes) <= stored
            assert len(backup.hashes) == len(backup.host_pages)
            stored |= set(backup.hashes)
    assert stored == {
        page_hash
        for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 9, 9])
        for page_hash in page_hashes(kit.key(tokens).units, 2)
    }
    kit.index.transfers.acknowledge_backups(3)
    kit.check()


def test_a_backup_keeps_the_host_copy_of_both_halves() -> None:
    """D1. Begun before a split, it protects until its acknowledgement."""
    kit = Kit(page=2, hash_pages=True)
    node = kit.insert([1, 2, 3, 4]).node
    (write,) = kit.index.transfers.acknowledge_writes(1)
    (backup,) = kit.index.transfers.begin_backups(write)
    kit.match([1, 2, 8, 8])
    evict(kit.index, 4)
    assert evict_host(kit.index, 4) == 0
    assert kit.tree() == [(0, [1, 2], "H"), (2, [3, 4], "H")]
    assert kit.index.transfers.acknowledge_backups(1) == [backup] and backup.node is node
    assert evict_host(kit.index, 4) == 4
    kit.check()


def test_a_backup_needs_hashes_and_the_node() -> None:
    kit = Kit()
    kit.insert([1])
    write = kit.index.transfers.acknowledge_writes(1)[0]
    with pytest.raises(ValueError, match=r"carries no page hashes: call enable_hashes\(\)"):
        kit.index.transfers.begin_backups(write)
    evict(kit.index, 1)
    evict_host(kit.index, 1)
    with pytest.raises(ValueError, match="left the tree"):
        kit.index.transfers.begin_backups(write)
    kit.check()
