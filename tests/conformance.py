"""Replays of the recorded operation traces against TieredIndex, and the comparison with what was recorded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ray.index import IndexOptions, TieredIndex
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node
from tests.index_kit import evict, evict_host
from tests.index_pair import path_locks

TRACES = Path(__file__).resolve().parent / "data" / "tree_traces.jsonl.gz"


def traces() -> Iterator[dict[str, Any]]:
    """The recorded traces; tests/data/README.md says what they hold."""
    with gzip.open(TRACES, "rt") as lines:
        for line in lines:
            yield json.loads(line)


class Replay:
    """One recorded trace, replayed operation by operation. Tokens here, pages in the index."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.page_size = config["page_size"]
        self.index = TieredIndex(
            IndexOptions(
                page_size=self.page_size,
                device_pages=config["device_tokens"] // self.page_size,
                host_pages=config["host_tokens"] // self.page_size,
                eviction_policy=config["eviction_policy"],
                write_policy=config["write_policy"],
                load_back_threshold=config["load_back_threshold"],
            )
        )
        self.locks: dict[int, Node] = {}

    def answer(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Carries an operation out and returns what the recording calls `expect`."""
        answer: dict[str, Any] = getattr(self, operation["op"])(operation)
        self._end_blocking_writes()
        tree = self.index.tree
        answer["device_free"] = self.index.device.free_pages * self.page_size
        answer["host_free"] = self.index.host.free_pages * self.page_size
        answer["evictable"] = tree.evictable_pages * self.page_size
        answer["protected"] = tree.protected_pages * self.page_size
        return answer

    def match(self, operation: dict[str, Any]) -> dict[str, Any]:
        match = self.index.match(self._key(operation))
        return {"device_hit": match.device_pages * self.page_size, "host_hit": match.host_pages * self.page_size}

    def insert(self, operation: dict[str, Any]) -> dict[str, Any]:
        key = self._key(operation)
        pages = self.index.device.alloc(key.pages)
        if pages is None:
            return {"allocated": False}
        prefix = self.index.insert(key, pages).prefix_pages
        self.index.device.free(pages[:prefix])
        return {"allocated": True, "prefix_len": prefix * self.page_size}

    def evict(self, operation: dict[str, Any]) -> dict[str, Any]:
        return {"evicted": evict(self.index, operation["num_tokens"])}

    def evict_host(self, operation: dict[str, Any]) -> dict[str, Any]:
        return {"freed": evict_host(self.index, operation["num_tokens"])}

    def load_back(self, operation: dict[str, Any]) -> dict[str, Any]:
        match = self.index.match(self._key(operation))
        loaded = self.index.load_back(match)
        return {
            "loaded": loaded.tokens if loaded else 0,
            "device_hit": match.device_pages * self.page_size,
            "host_hit": match.host_pages * self.page_size,
        }

    def lock(self, operation: dict[str, Any]) -> dict[str, Any]:
        match = self.index.match(self._key(operation))
        self.index.tree.lock(match.device_node)
        self.locks[operation["id"]] = match.device_node
        return {"locked": match.device_pages * self.page_size}

    def unlock(self, operation: dict[str, Any]) -> dict[str, Any]:
        self.index.tree.unlock(self.locks.pop(operation["id"]))
        return {}

    def settle(self, operation: dict[str, Any]) -> dict[str, Any]:
        self.index.transfers.acknowledge_writes(len(self.index.transfers.writes))
        self.index.transfers.acknowledge_loads(len(self.index.transfers.loads))
        return {}

    def tree(self) -> list[list[Any]]:
        """The final tree as it is recorded: depth first, children ordered by their tokens."""
        rows: list[list[Any]] = []

        def visit(node: Node, depth: int) -> None:
            for child in sorted(node.children, key=_tokens):
                tiers = [child.value is not None, child.host_value is not None]
                rows.append([depth, _tokens(child), *tiers, path_locks(child)])
                visit(child, depth + 1)

        visit(self.index.tree.root, 0)
        return rows

    def _end_blocking_writes(self) -> None:
        # What was recorded waits for the copies of an eviction before the operation ends.
        while self.index.transfers.writes and self.index.transfers.writes[0].blocking:
            self.index.transfers.acknowledge_writes(1)

    def _key(self, operation: dict[str, Any]) -> Key:
        return Key.of(np.array(operation["tokens"], dtype=np.uint32), self.page_size)


def _tokens(node: Node) -> list[int]:
    return [int(token) for token in np.frombuffer(node.key, dtype="<u4")]
