"""LayerDoneCounter: a reader of layer N waits for layer N only; nobody waits forever (case 40)."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.layer_done import NO_LOAD, LayerDoneCounter, LayerLoadError, LayerTimeoutError
from hicache_ray.pools.layouts import KVSpec

DEADLINE = 20.0


def waiting(counter: LayerDoneCounter, layer: int, threads: ThreadPoolExecutor) -> Future[None]:
    """A reader of a layer in another thread, once that thread runs."""
    running = threading.Event()

    def read() -> None:
        running.set()
        counter.wait_until(layer)

    reader = threads.submit(read)
    assert running.wait(DEADLINE)
    return reader


def test_case_40_nothing_queued_means_no_producer_and_no_wait() -> None:
    counter = LayerDoneCounter(4, timeout=0.0)
    assert NO_LOAD == -1
    counter.wait_until(3)
    counter.set_consumer(NO_LOAD)
    counter.wait_until(3)


def test_case_40_producers_are_a_ring_of_three() -> None:
    counter = LayerDoneCounter(1)
    producers = []
    for _ in range(7):
        producers.append(counter.update_producer())
        counter.events(producers[-1]).complete(0)
    assert producers == [0, 1, 2, 0, 1, 2, 0]


def test_reader_waits_for_its_layer_only() -> None:
    counter = LayerDoneCounter(3, timeout=DEADLINE)
    producer = counter.update_producer()
    counter.set_consumer(producer)
    with ThreadPoolExecutor(2) as threads:
        first, second = waiting(counter, 0, threads), waiting(counter, 1, threads)
        counter.events(producer).complete(0)
        first.result(DEADLINE)
        assert not second.done()
        counter.events(producer).complete(1)
        second.result(DEADLINE)
    assert not counter.events(producer).finished()
    counter.events(producer).complete(2)
    assert counter.events(producer).finished()


def test_wait_ends_at_its_deadline_and_names_the_layer() -> None:
    counter = LayerDoneCounter(3, timeout=0.01)
    counter.set_consumer(counter.update_producer())
    with pytest.raises(LayerTimeoutError, match=r"layer 2 of load 0 did not arrive within 0\.01 s"):
        counter.wait_until(2)


def test_failed_load_wakes_its_readers_at_once() -> None:
    counter = LayerDoneCounter(3, timeout=DEADLINE)
    producer = counter.update_producer()
    counter.set_consumer(producer)
    with ThreadPoolExecutor(1) as threads:
        reader = waiting(counter, 2, threads)
        counter.events(producer).fail(OSError("bus error"))
        with pytest.raises(LayerLoadError, match="layer 2 of load 0 can't be read: bus error"):
            reader.result(DEADLINE)
    assert counter.events(producer).finished()


def test_place_in_the_ring_is_not_taken_while_its_load_runs() -> None:
    counter = LayerDoneCounter(2, timeout=0.01)
    for _ in range(3):
        counter.update_producer()
    with pytest.raises(LayerTimeoutError, match="layer 0 of load 0"):
        counter.update_producer()
    counter.events(0).complete(0)
    with pytest.raises(LayerTimeoutError, match="layer 1 of load 0"):
        counter.update_producer()
    counter.events(0).complete(1)
    assert counter.update_producer() == 0


def test_place_of_a_failed_load_is_free_again() -> None:
    counter = LayerDoneCounter(2, timeout=0.01)
    for _ in range(3):
        counter.events(counter.update_producer()).fail(OSError("gone"))
    assert counter.update_producer() == 0


def test_reader_of_an_old_load_is_not_held_up_by_a_new_one_in_its_place() -> None:
    counter = LayerDoneCounter(1, timeout=0.01)
    for _ in range(3):
        counter.events(counter.update_producer()).complete(0)
    counter.set_consumer(0)
    assert counter.update_producer() == 0
    counter.wait_until(0)


def test_unknown_producer_is_refused() -> None:
    counter = LayerDoneCounter(1)
    for producer in (0, 3, -2):
        with pytest.raises(ValueError, match=f"index {producer}"):
            counter.set_consumer(producer)


def test_device_pool_buffers_wait_for_their_layer() -> None:
    pool = DevicePool(KVSpec.mha(2, 1, 4), 2, 2)
    pool.layer_done.timeout = 0.01
    producer = pool.layer_done.update_producer()
    pool.layer_done.set_consumer(producer)
    pool.layer_done.events(producer).complete(0)
    assert pool.key_buffer(0).shape == (4, 1, 4)
    for read in (pool.key_buffer, pool.value_buffer, pool.kv_buffer):
        with pytest.raises(LayerTimeoutError, match="layer 1"):
            read(1)
    assert len(pool.layer_pages(1)) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_reader_on_another_stream_sees_the_layer() -> None:
    counter = LayerDoneCounter(2, "cuda", timeout=DEADLINE)
    producer = counter.update_producer()
    counter.set_consumer(producer)
    side = torch.cuda.Stream()
    big, seen = torch.zeros(1 << 26, device="cuda"), torch.zeros(2, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for layer in range(2):
            for _ in range(20):
                big.add_(1)
            counter.events(producer).complete(layer)
    for layer in range(2):
        counter.wait_until(layer)
        seen[layer] = big[-1]
    assert seen[0].item() >= 20 and seen[1].item() == 40
    assert counter.events(producer).finished()
