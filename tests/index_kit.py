"""A small index to try cases on: tokens in, tokens out, slots of unused pages given back."""

from __future__ import annotations

from typing import Any

import numpy as np

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.index import IndexOptions, Inserted, Match, TieredIndex
from hicache_ray.index.integrity import check_index
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node


def evict(index: TieredIndex, tokens: int) -> int:
    """Frees at least so many tokens of L1, whole nodes; returns how many were freed."""
    return index.evictor.evict_device(-(-tokens // index.page_size)) * index.page_size


def evict_host(index: TieredIndex, tokens: int) -> int:
    """Frees at least so many tokens of L2, whole nodes; returns how many were freed (case 36)."""
    return index.evictor.evict_host(-(-tokens // index.page_size)) * index.page_size


class Kit:
    """TieredIndex with the shorthand the cases use. Sizes are in tokens; page 1 unless said otherwise."""

    def __init__(self, *, page: int = 1, device: int = 64, host: int = 64, **options: Any) -> None:
        self.page = page
        options.setdefault("load_back_threshold", 1)
        self.index = TieredIndex(
            IndexOptions(page_size=page, device_pages=device // page, host_pages=host // page, **options)
        )

    def key(self, tokens: list[int], namespace: Namespace = EMPTY_NAMESPACE) -> Key:
        """The key of some tokens."""
        return Key.of(np.array(tokens, dtype=np.uint32), self.page, namespace=namespace, bigram=self.index.bigram)

    def insert(self, tokens: list[int], namespace: Namespace = EMPTY_NAMESPACE, **options: Any) -> Inserted:
        """Inserts a sequence with newly allocated pages; duplicates are given back."""
        key = self.key(tokens, namespace)
        pages = self.index.device.alloc(key.pages)
        assert pages is not None, "the device is full"
        inserted = self.index.insert(key, pages, **options)
        self.index.device.free(pages[: inserted.prefix_pages])
        return inserted

    def match(self, tokens: list[int], namespace: Namespace = EMPTY_NAMESPACE) -> Match:
        """Looks some tokens up."""
        return self.index.match(self.key(tokens, namespace))

    def hit(self, tokens: list[int], namespace: Namespace = EMPTY_NAMESPACE) -> tuple[int, int]:
        """Tokens found on the device, and beyond that on the host, without any effect."""
        device, host = self.index.peek(self.key(tokens, namespace))
        return device * self.page, host * self.page

    def settle(self) -> None:
        """Everything between L1 and L2 completes."""
        self.index.transfers.take_issued()
        self.index.transfers.acknowledge_writes(len(self.index.transfers.writes))
        self.index.transfers.acknowledge_loads(len(self.index.transfers.loads))

    def put(self, *tokens: int, **options: Any) -> Node:
        """Inserts tokens and settles; returns their deepest node."""
        node = self.insert(list(tokens), **options).node
        self.settle()
        return node

    def evict_order(self) -> list[list[int]]:
        """Evicts everything from the device, one node at a time: the tokens of the nodes, in order."""
        order: list[list[int]] = []
        while True:
            before = {node.seq: node for node in self.index.tree.nodes() if node.value is not None}
            if not evict(self.index, 1):
                return order
            self.settle()
            still = {node.seq for node in self.index.tree.nodes() if node.value is not None}
            order += [self.tokens(node) for seq, node in before.items() if seq not in still]

    def tokens(self, node: Node) -> list[int]:
        """The tokens of one node."""
        return [int(token) for token in np.frombuffer(node.key, dtype="<u4")]

    def tree(self) -> list[tuple[int, list[int], str]]:
        """Every node as (first token's depth, tokens, tiers), parents first."""
        rows = []
        for node in self.index.tree.nodes():
            tiers = ("D" if node.value is not None else "") + ("H" if node.host_value is not None else "")
            rows.append((node.start * self.page, self.tokens(node), tiers))
        return rows

    def check(self) -> None:
        """The index is consistent, and no page is lost."""
        check_index(self.index)
        for name, ledger in self.index.ledger().items():
            assert ledger.in_flight == 0, f"{ledger.in_flight} pages of the {name} are lost"
