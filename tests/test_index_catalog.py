"""An index made anew from a catalog goes on as one that never died: under every option, in every answer and state."""

from __future__ import annotations

import random
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.index import IndexOptions, TieredIndex
from hicache_ray.index.catalog import Catalog, catalog_of, host_pages_by_hash, restored
from hicache_ray.index.integrity import check_index
from hicache_ray.radix.eviction import eviction_policies, segmented_lru
from hicache_ray.radix.key import Key
from tests.index_kit import evict, evict_host

PLAIN = IndexOptions(page_size=1, device_pages=14, host_pages=26, load_back_threshold=1, refresh_remainder=True)
VALUES: dict[str, list[Any]] = {
    "page_size": [3],
    "device_pages": [10, 20],
    "host_pages": [16, 60],
    "eviction_policy": [*eviction_policies(), segmented_lru(3)],
    "write_policy": ["write_through_selective", "write_back"],
    "load_back_threshold": [4],
    "hash_pages": [True],
    "bigram": [True],
    "refresh_remainder": [False],
}
CASES = [(name, value) for name, values in VALUES.items() for value in values]
NAMESPACES = (*[EMPTY_NAMESPACE] * 4, Namespace(tenant="a"))


class Serving:
    """Random operations on one index; the same seed gives the same operations."""

    def __init__(self, options: IndexOptions, seed: object) -> None:
        self.index = TieredIndex(options)
        self.rng = random.Random(repr(seed))
        self.sequences: list[list[int]] = [[]]

    def step(self) -> object:
        """One operation; its answer without page numbers, which need not be equal."""
        index, rng = self.index, self.rng
        kind = rng.choices(("serve", "look", "evict", "evict_host", "policy"), (10, 4, 2, 1, 0.2))[0]
        if kind == "serve":
            return self._serve(self._key())
        if kind == "look":
            match = index.match(self._key())
            return match.device_pages, match.host_pages
        if kind == "policy":
            policy = rng.choice(("write_through", "write_through_selective", "write_back"))
            index.options = replace(index.options, write_policy=policy)
            return None
        tokens = rng.randint(1, 6) * index.page_size
        freed = evict(index, tokens) if kind == "evict" else evict_host(index, tokens)
        self._settle()
        return freed

    def _serve(self, key: Key) -> object:
        index = self.index
        match = index.match(key)
        index.tree.lock(match.device_node)
        loaded = index.load_back(match)
        have = match.device_pages + (len(loaded.device_pages) if loaded else 0)
        pages = index.allocate(key.pages - have)
        if pages is not None:
            priority = self.rng.choice((0, 0, 3))
            inserted = index.insert(key, pages, match=match, priority=priority, chunked=self.rng.random() < 0.1)
            index.device.free(pages[: max(0, inserted.prefix_pages - have)])
        index.tree.unlock(match.device_node)
        self._settle()
        return match.device_pages, match.host_pages, have, pages is None

    def _settle(self) -> None:
        index = self.index
        index.transfers.take_issued()
        index.transfers.acknowledge_writes(len(index.transfers.writes))
        index.transfers.acknowledge_loads(len(index.transfers.loads))

    def _key(self) -> Key:
        rng, index = self.rng, self.index
        earlier = rng.choice(self.sequences[-12:])
        tokens = earlier[: rng.randint(0, len(earlier))] if rng.random() < 0.5 else list(earlier)
        tokens += [rng.randrange(3) for _ in range(rng.randint(0, 4) * index.page_size)]
        tokens = tokens[: 9 * index.page_size]
        self.sequences.append(tokens)
        units = np.array(tokens, dtype=np.uint32)
        return Key.of(units, index.page_size, namespace=rng.choice(NAMESPACES), bigram=index.bigram)


def rebuilt(index: TieredIndex, on: TieredIndex | None = None) -> TieredIndex:
    """What a rank makes of an index's catalog in a recovery that keeps all pages; `on`: what it had before."""
    pages = host_pages_by_hash(index)
    catalog = Catalog.unpack(catalog_of(index).pack())
    retained = np.array([page_hash in pages for page_hash in catalog.hashes], dtype=bool)
    return restored(on or index, catalog, retained, pages.__getitem__)


def lose_device(index: TieredIndex) -> None:
    """L1 is lost, and with it what had no host copy or was below something that had none."""
    tree = index.tree
    kept = {tree.root}
    nodes = list(tree.nodes())
    kept.update(node for node in nodes if node.host_value is not None and node.parent in kept)
    lost = {node for node in nodes if node.host_value is None}
    for node in nodes:
        if node.parent in lost:
            lost.add(node)
    for node in reversed(nodes):
        if node.value is not None:
            node.queue_entry = None
            index.device.free(tree.clear_device(node))
        if node in lost:
            if node.host_value is not None:
                index.host.free(tree.clear_host(node))
            tree.remove(node)


def counted(index: TieredIndex, before: dict[str, int]) -> dict[str, int]:
    """What the counters grew by."""
    return {name: value - before[name] for name, value in asdict(index.stats).items()}


def test_every_option_is_tried() -> None:
    assert set(VALUES) == {field.name for field in fields(IndexOptions)}
    for name, value in CASES:
        assert value != getattr(PLAIN, name) or name == "eviction_policy"


@pytest.mark.parametrize(("option", "value"), CASES, ids=[f"{name}={value}"[:40] for name, value in CASES])
def test_a_rebuilt_index_goes_on_as_one_that_never_died(option: str, value: Any) -> None:
    """Same state, and then the same answers and the same state after every further operation."""
    evicted = 0
    for seed in range(12):
        options = replace(PLAIN, **{option: value})
        died, lived = (Serving(options, (option, value if isinstance(value, str) else 0, seed)) for _ in range(2))
        for _ in range(40):
            assert died.step() == lived.step()
        before = asdict(died.index.stats)
        lose_device(lived.index)
        died.index = rebuilt(died.index)
        check_index(died.index)
        assert died.index.options == lived.index.options and asdict(died.index.stats) == before
        assert died.index.tree.digest() == lived.index.tree.digest()
        lived_before = asdict(lived.index.stats)
        for step in range(40):
            assert died.step() == lived.step(), f"seed {seed}, step {step}"
            assert died.index.tree.digest() == lived.index.tree.digest(), f"seed {seed}, step {step}"
            assert counted(died.index, before) == counted(lived.index, lived_before)
        check_index(died.index)
        evicted += died.index.stats.evicted_host_pages
    assert evicted > 0 or option == "host_pages"


def test_a_fresh_rank_takes_all_over_that_a_tree_depends_on() -> None:
    """The catalog alone makes the trees equal, whatever the rank had; what is chosen at run time comes beside it."""
    for seed in range(20):
        survivor = Serving(replace(PLAIN, refresh_remainder=False), seed)
        for _ in range(40):
            survivor.step()
        fresh = TieredIndex(replace(survivor.index.options))
        other = rebuilt(survivor.index, on=fresh)
        assert other.tree.digest() == rebuilt(survivor.index).tree.digest()


def test_what_was_changed_at_run_time_is_kept() -> None:
    index = TieredIndex(PLAIN)
    index.events.sink = lambda kind, tier, node, reason: None
    index.options = replace(index.options, write_policy="write_back")
    index.enable_hashes()
    index.options = replace(index.options, load_back_threshold=7)
    new = rebuilt(index)
    assert (
        new.options
        == index.options
        == replace(PLAIN, write_policy="write_back", hash_pages=True, load_back_threshold=7)
    )
    assert new.events.sink is index.events.sink and new.stats is index.stats


@pytest.mark.parametrize("name", ["page_size", "device_pages", "host_pages", "eviction_policy", "hash_pages", "bigram"])
def test_an_index_refuses_to_become_another(name: str) -> None:
    index = TieredIndex(PLAIN)
    with pytest.raises(ValueError, match=f"{name} of an index can't be changed"):
        index.options = replace(PLAIN, **{name: "mru" if name == "eviction_policy" else 3})
    assert index.options == PLAIN
