"""In which order nodes go, per policy, and that the queues behind it stay small."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ray.pages import NO_PAGES
from hicache_ray.radix.eviction import (
    CandidateQueue,
    EvictionStrategy,
    eviction_policies,
    eviction_policy,
    register_eviction_policy,
    segmented_lru,
)
from hicache_ray.radix.node import Node
from hicache_ray.radix.tree import is_device_candidate
from tests.index_kit import Kit, evict, evict_host

A, B, C, D = [1, 10], [2, 20], [3, 30], [4, 40]
NAMES = {1: "A", 2: "B", 3: "C", 4: "D"}


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "DBAC"),
        ("lfu", "DCAB"),
        ("fifo", "ABCD"),
        ("mru", "CABD"),
        ("filo", "DCBA"),
        ("priority", "BDAC"),
        ("slru", "DCBA"),
    ],
)
def test_order_per_policy(policy: str, order: str) -> None:
    """Case 31."""
    kit = Kit(host=0, eviction_policy=policy)
    for tokens, priority in ((A, 1), (B, 0), (C, 2), (D, 1)):
        kit.insert(tokens, priority=priority)
    for tokens in (B, B, A):
        kit.insert(tokens)
    kit.match(C)
    assert "".join(NAMES[tokens[0]] for tokens in kit.evict_order()) == order


@pytest.mark.parametrize("policy", eviction_policies())
def test_ties_go_by_sequence_number(policy: str) -> None:
    """Case 32. Two indexes that get the same calls evict the same nodes in the same order."""
    orders = []
    for _ in range(2):
        kit = Kit(host=0, eviction_policy=policy)
        for number in range(8):
            kit.insert([number % 2, number % 3, number])
            kit.match([number % 2, 5])
        orders.append(kit.evict_order())
    assert orders[0] == orders[1] and len(orders[0]) > 8


def test_whole_nodes_only() -> None:
    """Case 33. One token asked for, two freed."""
    kit = Kit(host=0)
    kit.put(1, 2)
    assert evict(kit.index, 1) == 2
    assert evict(kit.index, 1) == 0


def test_backed_nodes_stay_on_the_host() -> None:
    """Case 34. [5, 6] without a host copy is deleted, [1..4] then becomes host-only and a candidate there."""
    kit = Kit(write_policy="write_through_selective")
    kit.put(1, 2, 3, 4)
    kit.put(1, 2, 3, 4, 5, 6)
    assert evict(kit.index, 1) == 2
    assert kit.tree() == [(0, [1, 2, 3, 4], "DH")]
    assert evict(kit.index, 1) == 4
    assert kit.tree() == [(0, [1, 2, 3, 4], "H")]
    assert evict_host(kit.index, 1) == 4
    kit.check()


def test_parents_become_candidates_in_the_same_call() -> None:
    """Case 35."""
    kit = Kit(host=0)
    kit.put(1, 2)
    kit.put(1, 2, 3)
    kit.put(1, 2, 3, 4)
    assert evict(kit.index, 4) == 4
    assert kit.tree() == []
    kit.check()


def test_priority_is_raised_on_the_shared_prefix_only() -> None:
    """Case 38."""
    kit = Kit()
    upper = kit.insert([1, 2], priority=1).node
    lower = kit.insert([1, 2, 3, 4], priority=9).node
    assert (upper.priority, lower.priority) == (9, 9)
    kit = Kit()
    rest = kit.insert([1, 2, 3, 4], priority=2).node
    new = kit.insert([1, 2, 9], priority=7).node
    assert rest.parent is new.parent and rest.parent is not None
    assert (rest.parent.priority, rest.priority, new.priority) == (7, 2, 7)


def test_an_insert_moves_a_node_that_no_lock_holds() -> None:
    """A key that decreases is noticed at once, also when the walk began at a handle and so did not pass the node."""
    kit = Kit(host=0, eviction_policy="mru")
    kit.put(1)
    match = kit.match([1])
    kit.put(2)
    kit.index.insert(kit.key([1]), NO_PAGES, match=match)
    assert kit.evict_order() == [[1], [2]]


def test_a_policy_of_ones_own() -> None:
    register_eviction_policy("fewest_pages", EvictionStrategy(lambda node: node.pages))
    kit = Kit(host=0, eviction_policy="fewest_pages")
    for tokens in ([1, 1, 1], [2], [3, 3]):
        kit.put(*tokens)
    assert kit.evict_order() == [[2], [3, 3], [1, 1, 1]]
    kit = Kit(host=0, eviction_policy=segmented_lru(protected_hits=1))
    kit.put(1)
    assert kit.evict_order() == [[1]]


def test_policies_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="'newest' is unknown; registered are lru, lfu"):
        eviction_policy("newest")
    with pytest.raises(ValueError, match="'lru' is taken"):
        register_eviction_policy("lru", eviction_policy("lfu"))
    with pytest.raises(TypeError, match="no EvictionStrategy"):
        register_eviction_policy("x", "lru")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="protected_hits is 0"):
        segmented_lru(protected_hits=0)
    register_eviction_policy("lru", eviction_policy("lru"))


def _nodes(count: int) -> list[Node]:
    root = Node(0, None, b"", 0, 0, 0)
    nodes = [Node(seq, root, b"key", 1, seq, 0) for seq in range(1, count + 1)]
    for node in nodes:
        node.value = np.array([node.seq])
    return nodes


@pytest.mark.parametrize("policy", ["lru", "mru"])
def test_a_queue_holds_a_bounded_number_of_outdated_entries(policy: str) -> None:
    queue = CandidateQueue(eviction_policy(policy), lambda node: True)
    nodes = _nodes(10)
    for tick in range(10_000):
        node = nodes[tick % 10]
        node.last_access = 100 + tick
        queue.offer(node)
        assert len(queue) <= 2 * len(nodes) + 65
    order = [queue.pop() for _ in range(10)]
    assert order == (nodes if policy == "lru" else nodes[::-1])
    assert queue.pop() is None and len(queue) == 0


def test_what_is_no_candidate_any_more_is_passed_over() -> None:
    queue = CandidateQueue(eviction_policy("lru"), is_device_candidate)
    first, second = _nodes(2)
    for node in (first, second):
        queue.offer(node)
    first.lock_ref = 1
    assert queue.pop() is second and queue.pop() is None
    first.lock_ref = 0
    queue.offer(first)
    assert queue.pop() is first
