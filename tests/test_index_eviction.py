"""Evictions across the tiers: write-back, host filters, dropped victims."""

from __future__ import annotations

from dataclasses import replace

from hicache_ray.index import Write
from tests.index_kit import Kit, evict, evict_host


def test_write_back_writes_what_it_evicts() -> None:
    """Case 26."""
    kit = Kit(write_policy="write_back")
    kit.put(1, 2, 3)
    kit.put(1, 2, 3, 4, 5)
    assert evict(kit.index, 1) == 2
    kit.settle()
    assert kit.tree() == [(0, [1, 2, 3], "D"), (3, [4, 5], "H")]
    assert evict(kit.index, 3) == 3
    kit.settle()
    assert kit.tree() == [(0, [1, 2, 3], "H"), (3, [4, 5], "H")]
    assert kit.index.tree.evictable_pages == 0
    kit.check()


def test_a_blocking_write_is_protected_until_its_acknowledgement() -> None:
    kit = Kit(write_policy="write_back", host=4)
    kit.put(1, 2)
    pages = kit.match([1, 2]).node.value
    evict(kit.index, 2)
    (write,) = kit.index.transfers.take_issued()
    assert isinstance(write, Write) and write.blocking and pages is not None
    assert write.device_pages.tolist() == pages.tolist()
    assert evict_host(kit.index, 2) == 0
    kit.index.transfers.acknowledge_writes(1)
    assert evict_host(kit.index, 2) == 2
    kit.check()


def test_a_victim_without_room_on_the_host_is_dropped() -> None:
    """D12. write_back, and the host full of nodes that are also on the device."""
    kit = Kit(write_policy="write_back", device=8, host=2)
    kit.put(1, 2)
    evict(kit.index, 2)
    kit.settle()
    kit.index.load_back(kit.match([1, 2]))
    kit.settle()
    kit.put(3, 4)
    kit.match([1, 2])
    assert evict(kit.index, 2) == 2
    assert kit.tree() == [(0, [1, 2], "DH")]
    assert kit.index.stats.dropped_pages == 2
    kit.settle()
    kit.check()


def test_a_victim_above_a_needed_host_copy_is_passed_over() -> None:
    """D12. It can be neither written nor dropped; it is a candidate again later."""
    kit = Kit(write_policy="write_back", device=8, host=2)
    kit.put(1, 2)
    lower = kit.put(1, 2, 3, 4)
    kit.put(5, 6)
    kit.match([1, 2])
    kit.match([5, 6])
    evict(kit.index, 2)
    kit.settle()
    kit.index.tree.protect(lower)
    assert evict(kit.index, 4) == 2 and kit.index.stats.dropped_pages == 2
    assert kit.tree() == [(0, [1, 2], "D"), (2, [3, 4], "H")]
    kit.index.tree.release(lower)
    assert evict(kit.index, 2) == 2
    kit.settle()
    assert kit.tree() == [(0, [1, 2], "H")]
    kit.check()


def test_another_write_policy_may_come_later() -> None:
    """Host-only nodes left by write_back keep their way up: the node above is written before it goes."""
    kit = Kit(write_policy="write_back")
    kit.put(1, 2)
    kit.put(1, 2, 3)
    evict(kit.index, 1)
    kit.settle()
    kit.index.options = replace(kit.index.options, write_policy="write_through_selective")
    assert evict(kit.index, 2) == 2
    kit.settle()
    assert kit.tree() == [(0, [1, 2], "H"), (2, [3], "H")]
    kit.check()


def test_only_host_only_leaves_leave_the_host() -> None:
    """Case 36. Nodes on the device stay, protected ones are skipped, and the number freed is told."""
    kit = Kit()
    first, second, third = kit.put(1), kit.put(2), kit.put(3)
    assert evict_host(kit.index, 1) == 0
    kit.match([3])
    evict(kit.index, 2)
    kit.index.tree.protect(first)
    assert evict_host(kit.index, 1) == 1
    assert [node.seq for node in kit.index.tree.nodes()] == [first.seq, third.seq]
    assert evict_host(kit.index, 1) == 0
    kit.index.tree.release(first)
    assert evict_host(kit.index, 1) == 1
    assert second.parent is None
    kit.check()


def test_a_host_parent_follows_in_the_same_call() -> None:
    """Case 37. A chain of two host-only nodes of two tokens each; three are asked for, four freed."""
    kit = Kit()
    kit.put(1, 2)
    kit.put(1, 2, 3, 4)
    evict(kit.index, 4)
    assert evict_host(kit.index, 3) == 4
    assert kit.tree() == []
    kit.check()


def test_a_recording_of_d11_does_not_raise() -> None:
    """D11. A host-only leaf that came back to the device and left it again is taken off the host once."""
    kit = Kit()
    for _ in range(3):
        kit.put(1, 2, 3)
        kit.put(1, 2, 3, 4)
        evict(kit.index, 4)
        kit.match([1, 2])
    assert evict_host(kit.index, 1) == 1
    assert evict_host(kit.index, 9) == 3
    kit.check()
