"""Page hashes on the nodes: chained from the root, whenever they are asked for."""

from __future__ import annotations

import pytest

from hicache_ray.hashing import Namespace, page_hashes
from tests.index_kit import Kit


def path_hashes(kit: Kit, tokens: list[int], namespace: Namespace) -> list[bytes]:
    node = kit.match(tokens, namespace).node
    parts: list[list[bytes]] = []
    while node.parent is not None:
        assert node.hash_value is not None
        parts.append(node.hash_value)
        node = node.parent
    return [page_hash for part in reversed(parts) for page_hash in part]


@pytest.mark.parametrize("namespace", [Namespace(), Namespace(adapter="a"), Namespace(salt="s", tenant="t")])
@pytest.mark.parametrize("late", [False, True])
def test_hashes_are_chained_from_the_root(late: bool, namespace: Namespace) -> None:
    """D5. Storage attached to a tree that is not empty: old nodes are hashed, and new ones continue from them."""
    kit = Kit(page=2, hash_pages=not late)
    kit.insert([1, 2, 3, 4], namespace)
    kit.insert([1, 2, 9, 9], namespace)
    if late:
        kit.index.enable_hashes()
    kit.insert([1, 2, 3, 4, 5, 6], namespace)
    kit.settle()
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 9, 9]):
        expected = page_hashes(kit.key(tokens).units, 2, namespace=namespace)
        assert path_hashes(kit, tokens, namespace) == expected
    kit.check()


def test_a_write_begun_before_the_hashes_is_backed_up_with_them() -> None:
    """D5."""
    kit = Kit(page=2)
    kit.insert([1, 2, 3, 4])
    kit.insert([1, 2, 9, 9])
    kit.index.enable_hashes()
    write, other = kit.index.transfers.acknowledge_writes(2)
    assert write.hashes is None
    for begun, tokens in ((write, [1, 2, 3, 4]), (other, [1, 2, 9, 9])):
        last = kit.index.transfers.begin_backups(begun)[-1]
        assert last.prefix_hashes + last.hashes == page_hashes(kit.key(tokens).units, 2)
    kit.index.transfers.acknowledge_backups(3)
    kit.check()


def test_bigram_nodes_hash_their_pairs() -> None:
    """D10. One kind of key from the tree to the hashes."""
    kit = Kit(page=2, hash_pages=True, bigram=True)
    tokens = [1, 2, 3, 4, 5]
    pages = kit.index.device.alloc(2)
    assert pages is not None
    node = kit.index.insert(kit.key(tokens), pages).node
    assert node.hash_value == page_hashes(kit.key(tokens).units, 2, bigram=True)
    kit.settle()
    kit.check()
