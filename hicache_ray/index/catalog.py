"""The host tier of an index as a message, and an index made from one: how a tree passes from rank to rank.

A catalog lists the nodes that have a host copy and those above them, the most recent first and so parents before
children, with all that eviction depends on: the logical times of the nodes, their counters and sequence numbers, and
those of the tree itself. It holds no page numbers: those are each rank's own. An index restored from the same catalog
and the same retained pages is the same on every rank, whatever the ranks' trees were before, and goes on as the
catalog's own index would have gone on with an empty L1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from hicache_ray.hashing import HASH_BYTES, Namespace
from hicache_ray.index.tiered import TieredIndex
from hicache_ray.index.transfers import concatenated
from hicache_ray.pages import Pages
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node

CATALOG_VERSION = 2
Mask = npt.NDArray[np.bool_]


class CatalogError(ValueError):
    """Bytes that are no catalog of this version."""


class CatalogEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One node; attributes as in `Node`, but for these:

    Attributes:
        parent: place of its parent in the catalog, -1 below the root.
        units: its key.
        hashes: 32 bytes a page.
    """

    parent: int
    namespace: Namespace
    units: bytes
    hashes: bytes
    seq: int
    creation: int
    last_access: int
    hit_count: int
    priority: int

    @property
    def pages(self) -> int:
        """Pages of the node."""
        return len(self.hashes) // HASH_BYTES


class Catalog(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The nodes of one index that have a host copy, those above them, and its tree's clock and sequence counter."""

    entries: tuple[CatalogEntry, ...]
    tick: int = 0
    next_seq: int = 1
    version: int = CATALOG_VERSION

    @cached_property
    def hashes(self) -> list[bytes]:
        """Page hashes of all entries in order."""
        joined = b"".join(entry.hashes for entry in self.entries)
        return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]

    def pack(self) -> bytes:
        """The catalog as a message."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, message: bytes) -> Catalog:
        """Reads `pack`'s bytes; CatalogError for anything else."""
        try:
            catalog = msgspec.msgpack.decode(message, type=cls)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise CatalogError(f"not a catalog: {error}") from None
        if catalog.version != CATALOG_VERSION:
            raise CatalogError(f"a catalog of version {catalog.version}, this side reads {CATALOG_VERSION}")
        return catalog


def catalog_of(index: TieredIndex) -> Catalog:
    """The catalog of an index; nothing may be in flight."""
    # Using a node uses those above it, so a parent is at least as recent as its children and comes before them.
    order = sorted(_listed_nodes(index), key=lambda node: (-node.last_access, node.end, node.seq))
    places = {node.seq: at for at, node in enumerate(order)}
    hashes = _hashes_by_node(index)
    entries = tuple(
        CatalogEntry(
            parent=places.get(node.parent.seq, -1),  # type: ignore[union-attr]
            namespace=node.namespace,
            units=node.key,
            hashes=b"".join(hashes[node.seq]),
            seq=node.seq,
            creation=node.creation,
            last_access=node.last_access,
            hit_count=node.hit_count,
            priority=node.priority,
        )
        for node in order
    )
    return Catalog(entries, index.tree.tick, index.tree.next_seq)


def host_pages_by_hash(index: TieredIndex) -> dict[bytes, int]:
    """L2 page of every page hash in the tree."""
    hashes = _hashes_by_node(index)
    pages: dict[bytes, int] = {}
    for node in _backed_nodes(index):
        assert node.host_value is not None
        pages.update(zip(hashes[node.seq], node.host_value.tolist(), strict=True))
    return pages


def restored(index: TieredIndex, catalog: Catalog, retained: Mask, page_of: Callable[[bytes], int]) -> TieredIndex:
    """A new index in the place of another, whose tree holds the retained pages of a catalog on the host.

    Args:
        index: the one it replaces, whose options, counters and listener it takes over; not to be used afterwards.
        catalog: the agreed one.
        retained: for each page of the catalog whether it is kept. A page is dropped with everything below it.
        page_of: this rank's L2 page of a page hash; asked for retained pages only.
    """
    new = index.emptied()
    nodes: list[Node | None] = []
    kept: list[Pages] = []
    at = 0
    for entry in catalog.entries:
        mask = retained[at : at + entry.pages]
        count = entry.pages if mask.all() else int(np.argmin(mask))
        parent = new.tree.root if entry.parent < 0 else nodes[entry.parent]
        if parent is None or count == 0 or (entry.parent >= 0 and parent.pages < catalog.entries[entry.parent].pages):
            nodes.append(None)
        else:
            hashes = catalog.hashes[at : at + count]
            pages = np.array([page_of(page_hash) for page_hash in hashes], dtype=np.int64)
            nodes.append(_add(new, parent, entry, count, pages, hashes))
            kept.append(pages)
        at += entry.pages
    new.tree.tick, new.tree.next_seq = catalog.tick, catalog.next_seq
    everything = new.host.alloc(new.host.total)
    assert everything is not None
    new.host.free(np.setdiff1d(everything, concatenated(kept), assume_unique=True))
    return new


def _backed_nodes(index: TieredIndex) -> list[Node]:
    return [node for node in index.tree.nodes() if node.host_value is not None]


def _listed_nodes(index: TieredIndex) -> set[Node]:
    """Nodes with a host copy, and those above them, which write_back leaves without one for a while."""
    listed: set[Node] = set()
    for node in reversed(list(index.tree.nodes())):
        if node.host_value is not None or node in listed:
            assert node.parent is not None
            listed |= {node, node.parent}
    return listed - {index.tree.root}


def _hashes_by_node(index: TieredIndex) -> dict[int, list[bytes]]:
    """Page hashes of every node by its sequence number; computed where the tree carries none."""
    hashes: dict[int, list[bytes]] = {index.tree.root.seq: []}
    for node in index.tree.nodes():
        assert node.parent is not None
        hashes[node.seq] = node.hash_value or index.hashes_of(node, hashes[node.parent.seq])
    return hashes


def _add(index: TieredIndex, parent: Node, entry: CatalogEntry, count: int, pages: Pages, hashes: list[bytes]) -> Node:
    step = index.tree.page_bytes
    units = b"\0" * (parent.end * step) + entry.units[: count * step]
    key = Key(units, step, entry.namespace, index.bigram)
    tree = index.tree
    tree.tick, tree.next_seq = entry.creation, entry.seq
    node = tree.add_leaf(parent, key, value=None, host_value=pages, priority=entry.priority)
    node.last_access, node.hit_count = entry.last_access, entry.hit_count
    tree.reorder(node)
    if index.options.hash_pages:
        node.hash_value = hashes
    return node
