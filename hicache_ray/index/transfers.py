"""The index's tables of transfers in flight: each ends through its acknowledgement, oldest first (cases 24, 25)."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from hicache_ray.index.types import Backup, Events, Load, Write
from hicache_ray.pages import NO_PAGES, Pages
from hicache_ray.radix.node import Node
from hicache_ray.radix.tree import RadixTree

_Transfer = TypeVar("_Transfer", Write, Load, Backup)


class Transfers:
    """Writes, loads and backups in flight, and what each keeps from being evicted meanwhile.

    A write or a load locks the path down to its node. A blocking write and a backup protect the node's host copy. A
    node that splits stays the lower half, so lock and protection, which reach upwards, go on holding for both halves.

    Attributes:
        writes, loads, backups: oldest first.
    """

    def __init__(self, tree: RadixTree, events: Events) -> None:
        self._tree = tree
        self._events = events
        self._issued: list[Write | Load] = []
        self._seqs = itertools.count()
        self.writes: deque[Write] = deque()
        self.loads: deque[Load] = deque()
        self.backups: deque[Backup] = deque()

    def is_idle(self) -> bool:
        """Whether none is in flight."""
        return not (self.writes or self.loads or self.backups)

    def take_issued(self) -> list[Write | Load]:
        """Writes and loads issued since the last call, in order."""
        issued, self._issued = self._issued, []
        return issued

    def issue_write(self, node: Node, host_pages: Pages, blocking: bool) -> None:
        """Begins to copy a node to the host."""
        assert node.value is not None
        self._tree.set_host(node, host_pages)
        if blocking:
            self._tree.protect(node)
        else:
            self._tree.lock(node)
        write = Write(next(self._seqs), node, node.end - node.pages, node.value, host_pages, node.hash_value, blocking)
        self.writes.append(write)
        self._issued.append(write)

    def issue_load(self, node: Node, start: int, device_pages: Pages, host_pages: Pages) -> None:
        """Begins to copy host pages that end at `node` to the device."""
        self._tree.lock(node)
        load = Load(next(self._seqs), node, start, device_pages, host_pages)
        self.loads.append(load)
        self._issued.append(load)

    def acknowledge_writes(self, n: int) -> list[Write]:
        """Ends the `n` oldest writes. Raises ValueError, and ends none, when fewer are in flight."""
        done = _oldest(self.writes, n, "writes")
        for write in done:
            if write.blocking:
                self._tree.release(write.node)
            else:
                self._tree.unlock(write.node)
            if self._events.sink is not None:
                for node in self._covered(write.node, write.start):
                    self._events.emit("stored", "host", node, "written")
        return done

    def acknowledge_loads(self, n: int) -> list[Load]:
        """Ends the `n` oldest loads. Raises ValueError, and ends none, when fewer are in flight."""
        done = _oldest(self.loads, n, "loads")
        for load in done:
            self._tree.unlock(load.node)
        return done

    def begin_backups(self, write: Write) -> list[Backup]:
        """Begins the backups to L3 that an acknowledged write makes possible: its own, that of ancestors which L3 was
        never sent, and those that waited for it. Parents first, so that no page is sent before those it can only be
        found through.

        An ancestor that has a host copy and was never sent (it is older than the attached store) goes first. While one
        has no host copy (write_back evicts from the leaves up) nothing below it goes; it takes them along in the end.

        Raises:
            ValueError: the tree carries no hashes, or the written pages were evicted in between.
        """
        node = write.node
        if not self._tree.contains(node) or node.host_value is None:
            raise ValueError(
                f"{node!r} left the tree between its acknowledgement and its backup: begin backups at once"
            )
        due: list[Node] = []
        for part in self._covered(node, 0):
            if part.stored:
                continue
            if part.host_value is None or (part.end <= write.start and part in self.unwritten()):
                break
            due.append(part)
        else:
            due += self._waiting_below(node)
        for part in due:
            part.stored = True
        return [self._begin(part) for part in due]

    def _waiting_below(self, node: Node) -> list[Node]:
        """Nodes below one that is sent to L3, which have their host copies and have waited for it, parents first."""
        waiting: list[Node] = []
        parents = [node]
        while parents:
            for child in parents.pop().children:
                if child.host_value is not None and not child.stored and child not in self.unwritten():
                    waiting.append(child)
                    parents.append(child)
        return waiting

    def unwritten(self) -> set[Node]:
        """Nodes whose host copy is still being written."""
        return {part for write in self.writes for part in self._covered(write.node, write.start)}

    def _begin(self, node: Node) -> Backup:
        start, hashes = node.start, self._path_hashes(node)
        # A host copy with something below it is not evicted: protecting the node keeps those above it, too.
        path = concatenated([part.host_value for part in self._covered(node, 0) if part.host_value is not None])
        assert len(path) == node.end, f"{node!r} is sent to L3, and something above it has no host copy"
        backup = Backup(next(self._seqs), node, start, path[start:], hashes[start:], hashes[:start], path[:start])
        self._tree.protect(node)
        self.backups.append(backup)
        return backup

    def acknowledge_backups(self, n: int) -> list[Backup]:
        """Ends the `n` oldest backups. Raises ValueError, and ends none, when fewer are in flight."""
        done = _oldest(self.backups, n, "backups")
        for backup in done:
            self._tree.release(backup.node)
        return done

    def _path_hashes(self, node: Node) -> list[bytes]:
        hashes: list[bytes] = []
        for part in self._covered(node, 0):
            if part.hash_value is None:
                raise ValueError("the tree carries no page hashes: call enable_hashes() before backups begin")
            hashes += part.hash_value
        return hashes

    def _covered(self, node: Node, start: int) -> Iterator[Node]:
        """The nodes that hold the pages from depth `start` to the end of `node`, from the top."""
        path: list[Node] = []
        walker: Node | None = node
        while walker is not None and walker.end > start:
            path.append(walker)
            walker = walker.parent
        return reversed(path)


def _oldest(table: deque[_Transfer], n: int, name: str) -> list[_Transfer]:
    if n == len(table):
        done = list(table)
        table.clear()
        return done
    if not 0 <= n < len(table):
        raise ValueError(f"{n} {name} acknowledged, but {len(table)} are in flight")
    return [table.popleft() for _ in range(n)]


def concatenated(parts: list[Pages]) -> Pages:
    """The parts as one array; no copy for a single part."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_PAGES
