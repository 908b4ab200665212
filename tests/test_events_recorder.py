"""The event log of an index: what it says (cases 62, 63), and that replaying it gives the tree, per tier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hicache_ray.events import (
    CPU,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventIndex,
    EventRecorder,
    ReplayError,
)
from hicache_ray.events.index import Block
from hicache_ray.events.wire import MEDIA, Event
from hicache_ray.hashing import Namespace, event_id, page_hashes
from hicache_ray.index import TieredIndex
from hicache_ray.index.catalog import catalog_of, host_pages_by_hash, restored
from hicache_ray.rank.audit import audit_of
from tests.index_kit import Kit, evict, evict_host
from tests.test_cache_random import STEPS, Driver

SEQUENCES = int(os.environ.get("HICACHE_RANDOM_EVENT_SEQUENCES", "40"))

ONE, TWO = 3817746824117602890, -4216701448867210342
"""Event integers of the pages of [1, 2, 3, 4], two tokens each (case 7)."""


def recorded(kit: Kit) -> tuple[EventRecorder, list[Event]]:
    """A recorder on a kit, and a list that `drain` fills; what the log begins with is left out."""
    recorder = EventRecorder(kit.index)
    drain(recorder)
    return recorder, []


def drain(recorder: EventRecorder) -> list[Event]:
    step = recorder.take()
    return list(step.batch().events) if step else []


def pages(events: Sequence[Event]) -> list[tuple[str | None, tuple[object, ...] | None, tuple[object, ...]]]:
    """Stored events page by page: medium, tokens of the parent page (None at the root), tokens of the page."""
    tokens: dict[int, tuple[object, ...]] = {}
    rows = []
    for event in events:
        if not isinstance(event, BlockStored):
            continue
        parent = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            tokens[block_hash] = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            rows.append((event.medium, None if parent is None else tokens[parent], tokens[block_hash]))
            parent = block_hash
    return rows


def tree_of(index: TieredIndex) -> dict[str, dict[int, Block]]:
    """What the index holds by tier, as a replayed log would have it; pages still being written are not on the host."""
    found: dict[str, dict[int, Block]] = {GPU: {}, CPU: {}}
    unwritten = index.transfers.unwritten()
    step = 8 if index.bigram else 4
    for node in index.tree.nodes():
        assert node.parent is not None and node.hash_value is not None
        parent = event_id(node.parent.hash_value[-1]) if node.parent.hash_value else None
        on_host = node.host_value is not None and node not in unwritten
        for number, page_hash in enumerate(node.hash_value):
            size = index.page_size * step
            units = node.key[number * size : (number + 1) * size]
            numbers = [int.from_bytes(units[at : at + 4], "little") for at in range(0, len(units), 4)]
            tokens = tuple(zip(numbers[::2], numbers[1::2], strict=True)) if index.bigram else tuple(numbers)
            block = Block(parent, tokens, node.namespace)
            parent = event_id(page_hash)
            for medium, held in ((GPU, node.value is not None), (CPU, on_host)):
                if held:
                    found[medium][parent] = block
    return found


def same(log: EventIndex, index: TieredIndex) -> None:
    expected = tree_of(index)
    for medium in MEDIA.values():
        assert log.blocks(medium) == expected[medium], medium


def writes_back(index: TieredIndex) -> bool:
    """Whether the copy of an evicted node (write_back) is still on its way."""
    return any(write.blocking for write in index.transfers.writes)


def parents_first(log: EventIndex, events: Sequence[Event], rewriting: bool) -> None:
    """Blocks come after their parents, but below a node that write_back has evicted and not yet copied everywhere."""
    known = {block_hash for tier in log.tiers.values() for block_hash in tier}
    for event in events:
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or event.parent_block_hash in known or rewriting, event
            known.update(event.block_hashes)


def test_case_62_stored_removed_and_cleared() -> None:
    """Page 2: cleared; [1,2] parent none, [3,4] parent of [1,2], [5,6] parent of [1,2]; evict removes [3,4]."""
    kit = Kit(page=2, write_policy="write_back")
    recorder = EventRecorder(kit.index)
    assert drain(recorder) == [AllBlocksCleared(GPU, "restarted"), AllBlocksCleared(CPU, "restarted")]
    kit.insert([1, 2, 3, 4])
    kit.insert([1, 2, 5, 6])
    events = drain(recorder)
    assert pages(events) == [(GPU, None, (1, 2)), (GPU, (1, 2), (3, 4)), (GPU, (1, 2), (5, 6))]
    first, second = (event for event in events if isinstance(event, BlockStored))
    assert first == BlockStored((ONE, TWO), None, (1, 2, 3, 4), 2, GPU, reason="computed")
    assert second.parent_block_hash == ONE
    kit.index.options = replace(kit.index.options, write_policy="write_through")
    kit.index.host.alloc(kit.index.host.total)
    evict(kit.index, 1)
    assert drain(recorder) == [BlockRemoved((TWO,), GPU, "evicted")]
    kit.match([9, 9])
    assert drain(recorder) == []
    kit.index.flush()
    assert drain(recorder) == [AllBlocksCleared(GPU, "flushed"), AllBlocksCleared(CPU, "flushed")]


def test_case_63_a_split_during_the_write_publishes_both_halves_after_the_ack() -> None:
    kit = Kit(page=2)
    recorder, _ = recorded(kit)
    kit.insert([1, 2, 3, 4])
    kit.insert([1, 2, 5, 6])
    assert all(medium == GPU for medium, _, _ in pages(drain(recorder)))
    kit.settle()
    events = drain(recorder)
    assert pages(events) == [(CPU, None, (1, 2)), (CPU, (1, 2), (3, 4)), (CPU, (1, 2), (5, 6))]
    assert {event.reason for event in events} == {"written"}


def test_each_way_onto_and_off_a_tier_has_its_reason() -> None:
    kit = Kit(page=2, device=8, host=8)
    recorder, _ = recorded(kit)
    kit.put(1, 2, 3, 4)
    assert [(e.medium, e.reason) for e in drain(recorder)] == [(GPU, "computed"), (CPU, "written")]
    evict(kit.index, 4)
    assert drain(recorder) == [BlockRemoved((ONE, TWO), GPU, "evicted")]
    assert kit.index.load_back(kit.match([1, 2, 3, 4])) is not None
    assert [(e.medium, e.reason) for e in drain(recorder)] == [(GPU, "loaded")]
    kit.settle()
    evict(kit.index, 4)
    evict_host(kit.index, 4)
    assert [(type(e), e.medium, e.reason) for e in drain(recorder)] == [
        (BlockRemoved, GPU, "evicted"),
        (BlockRemoved, CPU, "evicted"),
    ]
    room = kit.index.allocate_host(2)
    assert room is not None
    key = kit.key([1, 2, 3, 4])
    kit.index.attach_host(key, 0, room, page_hashes(key.units, 2))
    assert [(e.medium, e.reason) for e in drain(recorder)] == [(CPU, "fetched")]


def test_write_back_without_room_on_the_host_drops() -> None:
    """D12: the device copy is given up without the host copy it was owed, and the event says so."""
    kit = Kit(page=2, device=8, host=4, write_policy="write_back")
    recorder, _ = recorded(kit)
    kit.insert([1, 2, 3, 4])
    held = kit.index.host.alloc(2)
    drain(recorder)
    evict(kit.index, 4)
    assert [event.reason for event in drain(recorder)] == ["dropped"]
    assert held is not None


def test_namespaces_and_pairs_are_in_the_events() -> None:
    kit = Kit(page=2, bigram=True)
    recorder, _ = recorded(kit)
    kit.put(1, 2, 3, 4, 5)
    (stored, _) = drain(recorder)
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == ((1, 2), (2, 3), (3, 4), (4, 5)) and stored.block_size == 2
    plain = Kit(page=2)
    recorder, _ = recorded(plain)
    namespace = Namespace(adapter="lora", salt="s")
    plain.insert([1, 2, 3, 4], namespace)
    (stored,) = drain(recorder)
    assert isinstance(stored, BlockStored) and stored.namespace == namespace
    assert stored.block_hashes[0] not in (ONE, TWO)


def test_a_log_that_begins_late_begins_with_what_is_there() -> None:
    kit = Kit(page=2, device=16, host=16)
    kit.put(1, 2, 3, 4)
    kit.put(7, 8)
    evict(kit.index, 2)
    kit.insert([5, 6])
    recorder = EventRecorder(kit.index)
    same(EventIndex.after([EventBatch(0.0, tuple(drain(recorder)))]), kit.index)


def test_an_index_restored_from_a_catalog_begins_the_log_anew() -> None:
    """After a recovery the tree is another one; the log says so."""
    kit = Kit(page=2, device=16, host=16)
    recorder = EventRecorder(kit.index)
    kit.put(1, 2, 3, 4)
    kit.put(1, 2, 5, 6)
    log = EventIndex()
    log.apply(EventBatch(0.0, tuple(drain(recorder))))
    catalog = catalog_of(kit.index)
    pages_of = host_pages_by_hash(kit.index)
    mask = np.array([True, True, False])
    index = restored(kit.index, catalog, mask, pages_of.__getitem__)
    recorder.begin(index)
    batch = EventBatch(0.0, tuple(drain(recorder)))
    assert batch.begins_anew
    log.apply(batch)
    same(log, index)
    assert len(log.blocks(CPU)) == 2 and not log.blocks(GPU)


def test_an_index_without_a_recorder_calls_nothing() -> None:
    kit = Kit(page=2)
    recorder = EventRecorder(kit.index)
    recorder.close()
    drain(recorder)
    kit.put(1, 2)
    assert kit.index.events.sink is None and recorder.take() is None


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([BlockRemoved((1,), GPU)], "block 1 is removed from GPU, which does not hold it"),
        ([BlockStored((1,), None, (5,), 1, GPU)] * 2, "block 1 is stored a second time in GPU"),
        ([BlockStored((1,), None, (5,), 1, GPU), BlockRemoved((1,), CPU)], "removed from CPU"),
    ],
)
def test_a_log_that_contradicts_itself_is_an_error(events: list[Event], text: str) -> None:
    with pytest.raises(ReplayError, match=text):
        EventIndex.after([EventBatch(0.0, tuple(events))])


def test_leading_blocks_are_counted_per_tier() -> None:
    log = EventIndex.after(
        [EventBatch(0.0, (BlockStored((1, 2), None, (5, 6), 1, GPU), BlockStored((1,), None, (5,), 1, CPU)))]
    )
    assert log.leading(GPU, [1, 2, 3]) == 2 and log.leading(CPU, [1, 2, 3]) == 1 and log.leading(CPU, [2]) == 0
    log.clear()
    assert log.leading(GPU, [1]) == 0


@pytest.mark.parametrize("block", range(4))
def test_the_replayed_log_of_random_runs_equals_the_tree_after_every_step(block: int) -> None:
    """cases 62, 63 under aborts, requeues, flushes, attaches, detaches and faults of the store; and every audit on the
    way is clean."""
    kinds: set[tuple[str, str | None, str]] = set()
    for seed in range(block, SEQUENCES, 4):
        driver = Driver(seed)
        cache = driver.group.caches[0]
        recorder, log = EventRecorder(cache.index), EventIndex()
        for step in range(STEPS):
            rewriting = writes_back(cache.index)
            driver.step()
            events = drain(recorder)
            try:
                parents_first(log, events, rewriting or writes_back(cache.index))
                log.apply(EventBatch(0.0, tuple(events)))
                same(log, cache.index)
                assert audit_of(cache).faults == ()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {step}: {error}") from error
            kinds.update((type(event).__name__, event.medium, event.reason) for event in events)
        driver.end()
    assert kinds >= {
        ("BlockStored", GPU, "computed"),
        ("BlockStored", GPU, "loaded"),
        ("BlockStored", CPU, "written"),
        ("BlockStored", CPU, "fetched"),
        ("BlockRemoved", GPU, "evicted"),
        ("BlockRemoved", GPU, "dropped"),
        ("BlockRemoved", CPU, "evicted"),
        ("AllBlocksCleared", CPU, "flushed"),
    }
