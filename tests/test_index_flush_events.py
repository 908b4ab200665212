"""Flush, the ledger and the events."""

from __future__ import annotations

import pytest

from hicache_ray.hashing import EMPTY_NAMESPACE
from hicache_ray.index import IndexBusyError, Ledger
from hicache_ray.index.integrity import check_index
from hicache_ray.radix.node import Node
from tests.index_kit import Kit, evict, evict_host


def test_flush_frees_everything() -> None:
    """D3, the index's part: what is in flight has to end first."""
    kit = Kit()
    node = kit.insert([1, 2, 3]).node
    with pytest.raises(IndexBusyError, match="1 writes, 3 locked pages are outstanding"):
        kit.index.flush()
    kit.settle()
    kit.index.tree.protect(node)
    with pytest.raises(IndexBusyError, match="1 host protections"):
        kit.index.flush()
    kit.index.tree.release(node)
    kit.index.flush()
    assert kit.tree() == [] and kit.hit([1, 2, 3]) == (0, 0)
    assert kit.index.ledger() == {"device": Ledger(64, 64, 0, 0), "host": Ledger(64, 64, 0, 0)}
    kit.put(1, 2, 3)
    kit.check()


def test_the_ledger_balances() -> None:
    kit = Kit()
    kit.put(1, 2, 3)
    evict(kit.index, 1)
    held, reserved = kit.index.allocate(5), kit.index.allocate_host(7)
    assert held is not None and reserved is not None
    assert kit.index.ledger() == {"device": Ledger(64, 59, 0, 5), "host": Ledger(64, 54, 3, 7)}
    kit.index.device.free(held)
    kit.index.host.free(reserved)
    kit.check()


def test_the_audit_finds_a_page_that_is_owned_twice() -> None:
    kit = Kit()
    node = kit.put(1, 2, 3)
    kit.check()
    assert node.value is not None
    kit.index.device.free(node.value[:1])
    with pytest.raises(AssertionError, match="device: a page of the tree is free"):
        check_index(kit.index)


class Log:
    """Collects events as (kind, tier, tokens)."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.rows: list[tuple[str, str, list[int], str]] = []
        kit.index.events.sink = self
        assert kit.index.events.sink is self

    def __call__(self, kind: str, tier: str, node: Node, reason: str) -> None:
        self.rows.append((kind, tier, self.kit.tokens(node), reason))

    def take(self) -> list[tuple[str, str, list[int], str]]:
        rows, self.rows = self.rows, []
        return rows


def test_events_of_inserts_and_evictions() -> None:
    """Case 62. Nothing is told twice over a split."""
    kit = Kit(page=2, host=0)
    log = Log(kit)
    kit.insert([1, 2, 3, 4], EMPTY_NAMESPACE)
    kit.insert([1, 2, 5, 6])
    assert log.take() == [
        ("stored", "device", [1, 2, 3, 4], "computed"),
        ("stored", "device", [5, 6], "computed"),
    ]
    evict(kit.index, 2)
    assert log.take() == [("removed", "device", [3, 4], "evicted")]
    kit.index.flush()
    assert log.take() == [("cleared", "device", [], "flushed"), ("cleared", "host", [], "flushed")]


def test_a_split_during_a_write_publishes_both_halves_after_the_acknowledgement() -> None:
    """Case 63."""
    kit = Kit(page=2)
    log = Log(kit)
    kit.insert([1, 2, 3, 4])
    kit.insert([1, 2, 5, 6])
    assert all(tier == "device" for _, tier, _, _ in log.take())
    kit.settle()
    assert log.take() == [("stored", "host", tokens, "written") for tokens in ([1, 2], [3, 4], [5, 6])]


def test_events_of_every_way_onto_and_off_a_tier() -> None:
    kit = Kit()
    kit.put(1, 2)
    log = Log(kit)
    evict(kit.index, 2)
    kit.index.load_back(kit.match([1, 2]))
    kit.settle()
    evict(kit.index, 2)
    kit.insert([1, 2])
    evict(kit.index, 2)
    evict_host(kit.index, 2)
    pages = kit.index.allocate_host(1)
    assert pages is not None
    kit.index.attach_host(kit.key([3]), 0, pages, [b""])
    assert [(kind, tier, reason) for kind, tier, _, reason in log.take()] == [
        ("removed", "device", "evicted"),
        ("stored", "device", "loaded"),
        ("removed", "device", "evicted"),
        ("stored", "device", "computed"),
        ("removed", "device", "evicted"),
        ("removed", "host", "evicted"),
        ("stored", "host", "fetched"),
    ]
    kit.index.events.sink = None
    kit.check()
