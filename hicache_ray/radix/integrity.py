"""Heavy checks of everything a tree promises; for tests and audits."""

from __future__ import annotations

from hicache_ray.radix.digest import MASK, clock_digest, node_digest
from hicache_ray.radix.node import Node
from hicache_ray.radix.tree import RadixTree, is_device_candidate, is_host_candidate


def check_tree(tree: RadixTree) -> None:
    """Raises AssertionError when structure, counters, queues or digest of a tree don't agree."""
    nodes = list(tree.nodes())
    seqs = [node.seq for node in nodes]
    assert len(set(seqs)) == len(seqs) == tree.node_count, f"{len(nodes)} nodes counted as {tree.node_count}"
    for node in (tree.root, *nodes):
        _check_children(tree, node)
    for node in nodes:
        _check_node(node)
    _check_counters(tree, nodes)
    _check_candidates(tree, nodes)
    _check_digest(tree, nodes)


def _check_children(tree: RadixTree, node: Node) -> None:
    children = node.children
    for child in children:
        assert child.parent is node and child.end == node.end + child.pages, f"{child!r} does not continue {node!r}"
        assert node is tree.root or child.namespace == node.namespace, f"{child!r} changes the namespace"
        assert len(child.key) == child.pages * tree.page_bytes and child.pages > 0, f"{child!r} has a wrong key"
    for head, child in (node.branches or {}).items():
        seed = child.namespace.seed if node is tree.root else b""
        assert head == seed + child.key[: tree.page_bytes], f"{child!r} is filed under another key"
    if node.branches is not None:
        assert node.only_child is None and (len(children) > 1 or node is tree.root), f"{node!r} keeps needless branches"
    on_device = sum(child.value is not None for child in children)
    assert node.device_children == on_device, f"{node!r} has {on_device} device children, not {node.device_children}"
    locked = sum(child.locked for child in children)
    assert node.locked_children == locked, f"{node!r} has {locked} locked children, not {node.locked_children}"


def _check_node(node: Node) -> None:
    parent = node.parent
    assert parent is not None
    for pages in (node.value, node.host_value, node.hash_value):
        assert pages is None or len(pages) == node.pages, f"{node!r} has {len(pages or ())} entries for its pages"
    assert node.value is not None or node.host_value is not None, f"{node!r} is on no tier"
    assert node.value is None or parent.value is not None, f"{node!r} is on the device below an evicted node"
    # Over a host-only node there is a host copy, or the device still has what write_back will write (case 26, D2).
    assert parent.value is not None or parent.host_value is not None, f"{node!r} hangs below a node on no tier"
    assert min(node.lock_ref, node.host_ref_counter, node.hit_count) >= 0, f"{node!r} has a negative counter"


def _check_counters(tree: RadixTree, nodes: list[Node]) -> None:
    device = [node for node in nodes if node.value is not None]
    counted = {
        "device_pages": sum(node.pages for node in device),
        "host_pages": sum(node.pages for node in nodes if node.host_value is not None),
        "evictable_pages": sum(node.pages for node in device if not node.locked),
        "protected_pages": sum(node.pages for node in device if node.locked),
        "protections": tree.root.host_ref_counter + sum(node.host_ref_counter for node in nodes),
    }
    for name, value in counted.items():
        assert getattr(tree, name) == value, f"{name} is {getattr(tree, name)}, the nodes make {value}"


def _check_candidates(tree: RadixTree, nodes: list[Node]) -> None:
    device = {id(entry) for entry in tree.device_candidates.entries()}
    host = {id(entry) for entry in tree.host_candidates.entries()}
    for node in nodes:
        if is_device_candidate(node) or is_host_candidate(node):
            entry = node.queue_entry
            assert entry is not None and id(entry) in (host if node.value is None else device), (
                f"{node!r} is not queued"
            )
            # An ascending key may have grown since; any other must be the one the node has now.
            key, current = entry[0], tree.strategy.key(node)
            assert key == current or (tree.strategy.ascending and key < current), f"{node!r} is queued in a wrong place"


def _check_digest(tree: RadixTree, nodes: list[Node]) -> None:
    total = sum(node_digest(node) for node in (tree.root, *nodes)) + clock_digest(tree.tick, tree.next_seq)
    assert tree.digest() == total & MASK, "the digest has missed a change"
