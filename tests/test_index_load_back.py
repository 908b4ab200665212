"""L2 to L1: what is worth loading, and making room for it."""

from __future__ import annotations

import pytest

from tests.index_kit import Kit, evict, evict_host


@pytest.mark.parametrize(("count", "loaded"), [(9, False), (10, True)])
def test_the_threshold(count: int, loaded: bool) -> None:
    """Case 39. Nine tokens are not worth it, ten are."""
    kit = Kit(load_back_threshold=10)
    kit.put(*range(count))
    evict(kit.index, count)
    match = kit.match(list(range(count)))
    assert (kit.index.load_back(match) is not None) is loaded
    assert match.device_node is kit.index.tree.root
    kit.settle()
    kit.check()


def test_the_threshold_is_for_the_whole_chain() -> None:
    """Case 39. Twice six are twelve; pages come in order, those of the upper node first."""
    kit = Kit(load_back_threshold=10)
    kit.put(*range(6))
    kit.put(*range(12))
    evict(kit.index, 12)
    loaded = kit.index.load_back(kit.match(list(range(12))))
    assert loaded is not None and loaded.tokens == 12
    match = kit.match(list(range(12)))
    assert kit.index.device_value(match).tolist() == loaded.device_pages.tolist()
    assert len(set(loaded.host_pages.tolist())) == 12
    kit.settle()
    kit.check()


@pytest.mark.parametrize(("quota", "loaded"), [(19, False), (20, True), (None, True)])
def test_the_quota(quota: int | None, loaded: bool) -> None:
    """Case 40. All or nothing."""
    kit = Kit()
    kit.put(*range(20))
    evict(kit.index, 20)
    digest = kit.index.tree.digest
    match = kit.match(list(range(20)))
    before = digest()
    assert (kit.index.load_back(match, quota_pages=quota) is not None) is loaded
    assert (digest() == before) is not loaded
    kit.settle()
    kit.check()


def test_others_make_room_for_a_load() -> None:
    """Case 40. What the load hangs below does not go, though the policy would have it go first."""
    kit = Kit(device=24, host=96, eviction_policy="mru")
    kit.put(1, 2)
    kit.put(1, 2, *range(10, 30))
    kit.match([1, 2, *range(10, 30)])
    assert evict(kit.index, 20) == 20
    kit.put(*range(50, 70))
    loaded = kit.index.load_back(kit.match([1, 2, *range(10, 30)]))
    assert loaded is not None and loaded.tokens == 20
    assert kit.hit([1, 2, *range(10, 30)]) == (22, 0)
    assert kit.hit(list(range(50, 70))) == (0, 20)
    kit.settle()
    kit.check()


def test_room_for_a_load_does_not_cost_what_is_loaded() -> None:
    """write_back: the eviction needs host pages itself, and may not take those that are about to be read."""
    kit = Kit(write_policy="write_back", device=4, host=6)
    kit.put(1, 2, 3, 4)
    evict(kit.index, 4)
    kit.settle()
    kit.put(5, 6, 7, 8)
    loaded = kit.index.load_back(kit.match([1, 2, 3, 4]))
    assert loaded is not None and kit.hit([1, 2, 3, 4]) == (4, 0)
    assert kit.index.stats.dropped_pages == 4
    kit.settle()
    kit.check()


def test_locked_others_leave_no_room() -> None:
    """Case 40. Then nothing is loaded and nothing has changed."""
    kit = Kit(device=4)
    kit.put(1, 2, 3)
    evict(kit.index, 3)
    kit.put(9)
    node = kit.put(7, 8)
    kit.index.tree.lock(node)
    match = kit.match([1, 2, 3])
    before = kit.index.tree.digest()
    assert kit.index.load_back(match) is None
    assert kit.index.tree.digest() == before
    kit.index.tree.unlock(node)
    assert kit.index.load_back(match) is not None


def test_a_load_is_locked_until_its_acknowledgement() -> None:
    """Case 40."""
    kit = Kit()
    node = kit.put(1, 2, 3)
    evict(kit.index, 3)
    loaded = kit.index.load_back(kit.match([1, 2, 3]))
    assert loaded is not None and loaded.node is node and node.lock_ref == 1
    assert evict(kit.index, 3) == 0
    assert [load.node for load in kit.index.transfers.acknowledge_loads(1)] == [node]
    assert evict(kit.index, 3) == 3
    kit.check()


def test_nothing_to_load() -> None:
    kit = Kit(load_back_threshold=0)
    kit.put(1, 2)
    assert kit.index.load_back(kit.match([1, 2])) is None
    match = kit.match([1, 2])
    kit.index.flush()
    assert kit.index.load_back(match) is None
    kit.put(3)
    match = kit.match([3])
    evict(kit.index, 1)
    evict_host(kit.index, 1)
    assert kit.index.load_back(match) is None
