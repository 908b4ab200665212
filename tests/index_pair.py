"""TieredIndex and NaiveIndex side by side: every operation on both, every answer and every state compared."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.index import IndexBusyError, IndexOptions, Match, TieredIndex
from hicache_ray.index.integrity import check_index
from hicache_ray.pages import Pages
from hicache_ray.radix.digest import MASK, clock_digest, node_digest
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node
from tests.index_kit import evict, evict_host
from tests.naive_index import ORDER, NaiveIndex, NaiveNode, Page

NAMESPACES = (*[EMPTY_NAMESPACE] * 6, Namespace(adapter="a"), Namespace(tenant="a"))
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
OPERATIONS = {
    "serve": 10,
    "request": 4,
    "finish": 5,
    "match": 2,
    "evict": 4,
    "evict_host": 1,
    "load_back": 5,
    "lock": 1,
    "unlock": 2,
    "acknowledge": 6,
    "prefetch": 2,
    "attach": 3,
    "flush": 0.2,
    "enable_hashes": 0.3,
    "change_write_policy": 0.4,
}
"""Every operation and how often it is done, relative to the others that can be done."""
MAX_REQUESTS = 3
"""Requests that run at once; more would lock everything."""


class Request(NamedTuple):
    """A request between its lookup and its insert, with a lock on the match's device node."""

    tokens: list[int]
    namespace: Namespace
    match: Match
    pages: Pages
    chunked: bool
    priority: int
    naive_node: NaiveNode


class Prefetch(NamedTuple):
    """Host pages on their way from L3, above a protected anchor."""

    key: Key
    anchor: Node
    anchor_pages: int
    pages: Pages
    naive_anchor: NaiveNode


class IndexPair:
    """A random index of each kind, and the random operations on them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.page_size = rng.choice((1, 1, 2, 3))
        self.bigram = rng.random() < 0.1
        self.alphabet = rng.choice((2, 2, 3))
        policy = rng.choice(list(ORDER))
        write_policy = rng.choice(WRITE_POLICIES)
        device, host = rng.choice((12, 24, 48)), rng.choice((0, 12, 24, 48, 96))
        load_pages, refresh_remainder = rng.choice((0, 1, 2, 4)), rng.random() < 0.5
        self.index = TieredIndex(
            IndexOptions(
                page_size=self.page_size,
                device_pages=device,
                host_pages=host,
                eviction_policy=policy,
                write_policy=write_policy,
                load_back_threshold=load_pages * self.page_size,
                hash_pages=rng.random() < 0.4,
                bigram=self.bigram,
                refresh_remainder=refresh_remainder,
            )
        )
        self.naive = NaiveIndex(device, host, policy, write_policy, load_pages, self.page_size, refresh_remainder)
        self.requests: list[Request] = []
        self.locks: list[tuple[Node, NaiveNode]] = []
        self.prefetches: list[Prefetch] = []
        self.sequences: list[list[int]] = [[]]
        self.did: Counter[str] = Counter()
        if rng.random() < 0.5:
            self.index.tree.digest()

    def step(self) -> None:
        """One random operation of those that can be done, then the comparison."""
        possible = {name: weight for name, weight in OPERATIONS.items() if self._can(name)}
        name = self.rng.choices(list(possible), list(possible.values()))[0]
        self.did[name] += 1
        getattr(self, name)()
        self.compare()

    def _can(self, name: str) -> bool:
        index = self.index
        needed = {
            "request": len(self.requests) < MAX_REQUESTS,
            "finish": self.requests,
            "evict": index.tree.device_pages,
            "evict_host": index.tree.host_pages,
            "load_back": index.tree.host_pages,
            "unlock": self.locks,
            "acknowledge": index.transfers.writes or index.transfers.loads or index.transfers.backups,
            "prefetch": index.host.total,
            "attach": self.prefetches,
        }
        return bool(needed.get(name, True))

    # -- operations --------------------------------------------------------------------------------------------------

    def request(self) -> None:
        """Lookup, lock, perhaps load back, and room for the rest, as a scheduler does."""
        tokens, namespace = self._tokens(), self.rng.choice(NAMESPACES)
        prompt = tokens[: self.rng.randint(0, len(tokens))]
        match, node = self._match(prompt, namespace)
        self._lock(match.device_node, node)
        rest = self._key(tokens, namespace).pages - match.device_pages
        pages = self.index.allocate(rest)
        assert _listed(pages) == self.naive.allocate(rest)
        if pages is None:
            self._unlock(match.device_node, node)
            return
        chunked, priority = self.rng.random() < 0.2, self.rng.choice((0, 0, 1, 5))
        self.requests.append(Request(tokens, namespace, match, pages, chunked, priority, node))

    def finish(self) -> None:
        """Inserts a request's sequence, or aborts it, and gives back what it owns."""
        self._finish(self.requests.pop(self.rng.randrange(len(self.requests))))

    def serve(self) -> None:
        """A request from its lookup to its end."""
        self.request()
        if self.requests:
            self._finish(self.requests.pop())

    def _finish(self, request: Request) -> None:
        duplicates = request.pages
        if self.rng.random() < 0.85:
            key = self._key(request.tokens, request.namespace)
            match = request.match if self.rng.random() < 0.7 else None
            inserted = self.index.insert(
                key, request.pages, match=match, priority=request.priority, chunked=request.chunked
            )
            pages = self._naive_key(key)
            prefix = self.naive.insert(pages, request.pages.tolist(), request.priority, request.chunked)
            assert inserted.prefix_pages == prefix and inserted.node.end == key.pages
            duplicates = request.pages[: max(0, prefix - request.match.device_pages)]
        self._unlock(request.match.device_node, request.naive_node)
        self.index.device.free(duplicates)
        self.naive.free_device.extend(duplicates.tolist())

    def match(self) -> None:
        self._match(self._tokens(), self.rng.choice(NAMESPACES))

    def evict(self) -> None:
        pages = self.rng.randint(0, 6)
        assert evict(self.index, pages * self.page_size) == self.naive.evict(pages) * self.page_size

    def evict_host(self) -> None:
        pages = self.rng.randint(0, 6)
        assert evict_host(self.index, pages * self.page_size) == self.naive.evict_host(pages) * self.page_size

    def load_back(self) -> None:
        match, _ = self._match(self.rng.choice(self.sequences[-8:]), EMPTY_NAMESPACE)
        quota = self.rng.choice((None, None, self.rng.randint(0, 8)))
        loaded = self.index.load_back(match, quota_pages=quota)
        bottom = self.naive_nodes()[match.node.seq]
        assert _listed(loaded.device_pages if loaded else None) == self.naive.load_back(bottom, quota)

    def lock(self) -> None:
        match, node = self._match(self._tokens(), self.rng.choice(NAMESPACES))
        self._lock(match.device_node, node)
        self.locks.append((match.device_node, node))

    def unlock(self) -> None:
        self._unlock(*self.locks.pop(self.rng.randrange(len(self.locks))))

    def acknowledge(self) -> None:
        """Some of the transfers in flight end; acknowledged writes may go on to L3."""
        index, naive, rng = self.index, self.naive, self.rng
        writes = index.transfers.acknowledge_writes(rng.randint(0, len(index.transfers.writes)))
        for write in writes:
            node, start, blocking = naive.acknowledge_write()
            assert (write.node.seq, write.start, write.blocking) == (node.seq, start, blocking)
            if index.options.hash_pages and rng.random() < 0.8:
                nodes = self.naive_nodes()
                for backup in index.transfers.begin_backups(write):
                    node = nodes[backup.node.seq]
                    naive.begin_backup(node)
                    path = [page_hash for step in node.path() for page_hash in naive.hashes(step, self.bigram)]
                    assert [*backup.prefix_hashes, *backup.hashes] == path
        for _ in index.transfers.acknowledge_loads(rng.randint(0, len(index.transfers.loads))):
            naive.acknowledge_load()
        for _ in index.transfers.acknowledge_backups(rng.randint(0, len(index.transfers.backups))):
            naive.acknowledge_backup()

    def prefetch(self) -> None:
        """Room in L2 for pages that L3 has beyond a match."""
        tokens, namespace = self._tokens(), self.rng.choice(NAMESPACES)
        match, _ = self._match(tokens, namespace)
        node = self.naive_nodes()[match.host_node.seq]
        self.index.tree.protect(match.host_node)
        self.naive.protections.append(node)
        matched = match.device_pages + match.host_pages
        found = self.rng.randint(0, match.key.pages - matched)
        pages = self.index.allocate_host(found)
        assert _listed(pages) == self.naive.allocate_host(found)
        if pages is None:
            pages, found = np.empty(0, dtype=np.int64), 0
        self.prefetches.append(Prefetch(match.key.prefix(matched + found), match.host_node, matched, pages, node))

    def attach(self) -> None:
        """A prefetch completes, or is revoked."""
        prefetch = self.prefetches.pop(self.rng.randrange(len(self.prefetches)))
        unused = prefetch.pages
        if self.rng.random() < 0.8:
            hashes = self._hashes(prefetch.key)[prefetch.anchor_pages :]
            unused = self.index.attach_host(prefetch.key, prefetch.anchor_pages, prefetch.pages, hashes)
            expected = self.naive.attach_host(
                self._naive_key(prefetch.key), prefetch.anchor_pages, prefetch.pages.tolist()
            )
            assert unused.tolist() == expected
        self.index.host.free(unused)
        self.naive.free_host.extend(unused.tolist())
        self.index.tree.release(prefetch.anchor)
        self.naive.protections.remove(prefetch.naive_anchor)

    def flush(self) -> None:
        busy = self.naive.protections or any(bottom.parent is not None for bottom in self.naive.locks)
        try:
            self.index.flush()
        except IndexBusyError:
            assert busy
        else:
            assert not busy
            self.naive.flush()
            # What is left are locks on the root, which hold nothing.
            roots = [(self.index.tree.root, self.naive.root) for _ in self.locks]
            self.locks = roots
            self.naive.locks = [self.naive.root for _ in self.naive.locks]
            self.requests = [
                request._replace(
                    match=request.match._replace(device_node=self.index.tree.root), naive_node=self.naive.root
                )
                for request in self.requests
            ]

    def enable_hashes(self) -> None:
        self.index.enable_hashes()

    def change_write_policy(self) -> None:
        self.naive.write_policy = self.rng.choice(WRITE_POLICIES)
        self.index.options = replace(self.index.options, write_policy=self.naive.write_policy)

    # -- comparison --------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Both sides are in the same state, and the fast one is consistent in itself."""
        index, naive = self.index, self.naive
        check_index(index)
        assert index.device.free_list().tolist() == list(naive.free_device)
        assert index.host.free_list().tolist() == list(naive.free_host)
        assert index.tree.evictable_pages == naive.evictable()
        assert index.stats.dropped_pages == naive.dropped
        nodes = self.naive_nodes()
        assert sorted(nodes) == sorted(node.seq for node in (index.tree.root, *index.tree.nodes()))
        for node in index.tree.nodes():
            assert _state(node) == self._naive_state(nodes[node.seq])
        self._compare_ledger()

    def _compare_ledger(self) -> None:
        requests = sum(len(request.pages) for request in self.requests)
        prefetches = sum(len(prefetch.pages) for prefetch in self.prefetches)
        ledger = self.index.ledger()
        assert (ledger["device"].in_flight, ledger["host"].in_flight) == (requests, prefetches)

    def naive_nodes(self) -> dict[int, NaiveNode]:
        """The naive nodes by sequence number, the root included."""
        return {node.seq: node for node in (self.naive.root, *self.naive.nodes())}

    def _naive_state(self, node: NaiveNode) -> tuple[Any, ...]:
        assert node.parent is not None
        return (
            node.parent.seq,
            b"".join(page[1] for page in node.pages),
            node.device,
            node.host,
            self.naive.lock_ref(node),
            sum(node is bottom for bottom in self.naive.protections),
            node.hit_count,
            node.priority,
            node.last_access,
            node.creation,
        )

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _match(self, tokens: list[int], namespace: Namespace) -> tuple[Match, NaiveNode]:
        key = self._key(tokens, namespace)
        peeked = self.index.peek(key)
        match = self.index.match(key)
        naive = self.naive.match(self._naive_key(key))
        assert peeked == (match.device_pages, match.host_pages) == (naive.device_pages, naive.host_pages)
        seqs = (naive.node.seq, naive.device_node.seq, naive.host_node.seq)
        assert (match.node.seq, match.device_node.seq, match.host_node.seq) == seqs
        on_device = [page for node in naive.device_node.path() for page in node.device or ()]
        assert self.index.device_value(match).tolist() == on_device
        return match, naive.device_node

    def _lock(self, node: Node, naive: NaiveNode) -> None:
        self.index.tree.lock(node)
        self.naive.locks.append(naive)

    def _unlock(self, node: Node, naive: NaiveNode) -> None:
        self.index.tree.unlock(node)
        self.naive.locks.remove(naive)

    def _tokens(self) -> list[int]:
        """A part of an earlier sequence, mostly continued: what makes paths grow, meet and part."""
        rng = self.rng
        earlier = rng.choice(self.sequences[-8:])
        kept = earlier[: rng.choice((len(earlier), len(earlier), rng.randint(0, len(earlier))))]
        more = rng.choice((0, rng.randint(1, 3 * self.page_size), rng.randint(1, 6 * self.page_size)))
        tokens = kept + [rng.randrange(self.alphabet) for _ in range(more)]
        if len(tokens) > 14 * self.page_size:
            tokens = tokens[: rng.randint(1, 5) * self.page_size]
        self.sequences.append(tokens)
        return tokens

    def _key(self, tokens: list[int], namespace: Namespace) -> Key:
        return Key.of(np.array(tokens, dtype=np.uint32), self.page_size, namespace=namespace, bigram=self.bigram)

    def _naive_key(self, key: Key) -> list[Page]:
        step = key.page_bytes
        return [(key.seed, key.units[at : at + step]) for at in range(0, len(key.units), step)]

    def _hashes(self, key: Key) -> list[bytes]:
        leaf = NaiveNode(0, NaiveNode(0, None, [], 0, 0), self._naive_key(key), 0, 0)
        return self.naive.hashes(leaf, self.bigram) if key.pages else []


def path_locks(node: Node) -> int:
    """Locks that hold a node: those taken on it and below it."""
    return node.lock_ref + sum(path_locks(child) for child in node.children)


def digest_from_scratch(index: TieredIndex) -> int:
    """The tree's digest, added up anew over all nodes."""
    tree = index.tree
    total = sum(node_digest(node) for node in (tree.root, *tree.nodes()))
    return (total + clock_digest(tree.tick, tree.next_seq)) & MASK


def _state(node: Node) -> tuple[Any, ...]:
    assert node.parent is not None
    return (
        node.parent.seq,
        node.key,
        _listed(node.value),
        _listed(node.host_value),
        path_locks(node),
        node.host_ref_counter,
        node.hit_count,
        node.priority,
        node.last_access,
        node.creation,
    )


def _listed(pages: Pages | None) -> list[int] | None:
    return None if pages is None else pages.tolist()
