"""The host tier of an index as a message, and an index made from one: how a tree passes from rank to rank (DESIGN 7).

A catalog lists the nodes that have a host copy, parents before children, with their keys, page hashes and what
eviction depends on, in order of last access. It holds no page numbers: those are each rank's own. An index restored
from the same catalog and the same retained pages is the same on every rank, whatever the ranks' trees were before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import msgpack
import numpy as np
import numpy.typing as npt

from hicache_ray.hashing import HASH_BYTES, Namespace, page_hashes
from hicache_ray.index.tiered import TieredIndex
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import NO_PAGES, Node, Pages

VERSION = 1
Mask = npt.NDArray[np.bool_]


class CatalogError(ValueError):
    """Bytes that are no catalog of this version."""


@dataclass(frozen=True)
class Entry:
    """One node: `parent` is the place of its parent in the catalog, -1 below the root."""

    parent: int
    namespace: Namespace
    units: bytes
    hashes: bytes
    """32 bytes a page."""
    hit_count: int
    priority: int

    @property
    def pages(self) -> int:
        """Pages of the node."""
        return len(self.hashes) // HASH_BYTES


@dataclass(frozen=True)
class Catalog:
    """The nodes of one index that have a host copy."""

    entries: tuple[Entry, ...]

    @cached_property
    def hashes(self) -> list[bytes]:
        """Page hashes of all entries in order."""
        joined = b"".join(entry.hashes for entry in self.entries)
        return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]

    def pack(self) -> bytes:
        """The catalog as a message."""
        rows = [[e.parent, list(e.namespace), e.units, e.hashes, e.hit_count, e.priority] for e in self.entries]
        return msgpack.packb([VERSION, rows])

    @classmethod
    def unpack(cls, message: bytes) -> Catalog:
        """Reads `pack`'s bytes; CatalogError for anything else."""
        try:
            version, rows = msgpack.unpackb(message)
            entries = tuple(
                Entry(p, Namespace(*ns), units, hashes, hits, prio) for p, ns, units, hashes, hits, prio in rows
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CatalogError(f"not a catalog: {error}") from None
        if version != VERSION:
            raise CatalogError(f"a catalog of version {version}, this side reads {VERSION}")
        return cls(entries)


def catalog_of(index: TieredIndex) -> Catalog:
    """The catalog of an index; nothing may be in flight."""
    nodes = sorted(_backed_nodes(index), key=lambda node: (node.last_access, node.end, node.seq))
    # A parent is at least as recent as its children, so it comes after them in this order: sort by depth first there.
    order = _parents_first(nodes)
    places = {node.seq: at for at, node in enumerate(order)}
    hashes = _hashes_by_node(index)
    return Catalog(
        tuple(
            Entry(
                parent=places.get(node.parent.seq, -1) if node.parent is not None else -1,
                namespace=node.namespace,
                units=node.key,
                hashes=b"".join(hashes[node.seq]),
                hit_count=node.hit_count,
                priority=node.priority,
            )
            for node in order
        )
    )


def host_pages_by_hash(index: TieredIndex) -> dict[bytes, int]:
    """L2 page of every page hash in the tree."""
    hashes = _hashes_by_node(index)
    pages: dict[bytes, int] = {}
    for node in _backed_nodes(index):
        assert node.host_value is not None
        pages.update(zip(hashes[node.seq], node.host_value.tolist(), strict=True))
    return pages


def restored(index: TieredIndex, catalog: Catalog, retained: Mask, page_of: Callable[[bytes], int]) -> TieredIndex:
    """A new index of the same kind, whose tree holds the retained pages of a catalog on the host.

    Args:
        index: says what kind; it must not be used afterwards.
        catalog: the agreed one.
        retained: for each page of the catalog whether it is kept. A page is dropped with everything below it.
        page_of: this rank's L2 page of a page hash; asked for retained pages only.
    """
    new = _empty_copy(index)
    nodes: list[Node | None] = []
    kept: list[Pages] = []
    at = 0
    for entry in catalog.entries:
        mask = retained[at : at + entry.pages]
        parent = new.tree.root if entry.parent < 0 else nodes[entry.parent]
        whole = entry.parent < 0 or _is_whole(parent, catalog.entries[entry.parent])
        count = int(np.argmin(mask)) if not mask.all() else entry.pages
        if parent is None or not whole or count == 0:
            nodes.append(None)
        else:
            hashes = catalog.hashes[at : at + count]
            pages = np.array([page_of(page_hash) for page_hash in hashes], dtype=np.int64)
            nodes.append(_add(new, parent, entry, count, pages, hashes))
            kept.append(pages)
        at += entry.pages
    _hold(new, np.concatenate(kept) if kept else NO_PAGES)
    return new


def _backed_nodes(index: TieredIndex) -> list[Node]:
    return [node for node in index.tree.nodes() if node.host_value is not None]


def _parents_first(nodes: list[Node]) -> list[Node]:
    order: list[Node] = []
    placed: set[int] = set()
    for node in nodes:
        path: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None and at.seq not in placed:
            path.append(at)
            at = at.parent
        for ancestor in reversed(path):
            placed.add(ancestor.seq)
            order.append(ancestor)
    return order


def _hashes_by_node(index: TieredIndex) -> dict[int, list[bytes]]:
    """Page hashes of every node by its sequence number; computed where the tree carries none."""
    hashes: dict[int, list[bytes]] = {index.tree.root.seq: []}
    for node in index.tree.nodes():
        assert node.parent is not None
        above = hashes[node.parent.seq]
        hashes[node.seq] = node.hash_value or page_hashes(
            node.key,
            index.page_size,
            prior=above[-1] if above else b"",
            namespace=node.namespace,
            bigram=index.bigram,
        )
    return hashes


def _empty_copy(index: TieredIndex) -> TieredIndex:
    new = TieredIndex(
        page_size=index.page_size,
        device_pages=index.device.total,
        host_pages=index.host.total,
        eviction_policy=index.tree.strategy,
        write_policy=index.write_policy,
        load_back_threshold=index.load_back_threshold,
        hash_pages=index.hash_pages,
        bigram=index.bigram,
    )
    new.on_event = index.on_event
    return new


def _is_whole(parent: Node | None, entry: Entry) -> bool:
    return parent is not None and parent.pages == entry.pages


def _add(index: TieredIndex, parent: Node, entry: Entry, count: int, pages: Pages, hashes: list[bytes]) -> Node:
    step = index.tree.page_bytes
    units = b"\0" * (parent.end * step) + entry.units[: count * step]
    key = Key(units, step, entry.namespace, index.bigram)
    index.tree.tick += 1
    node = index.tree.add_leaf(parent, key, value=None, host_value=pages, priority=entry.priority)
    node.hit_count = entry.hit_count
    if index.hash_pages:
        node.hash_value = hashes
    return node


def _hold(index: TieredIndex, kept: Pages) -> None:
    """Marks the kept pages as handed out in a fresh allocator."""
    everything = index.host.alloc(index.host.total)
    assert everything is not None
    index.host.free(np.setdiff1d(everything, kept, assume_unique=True))
