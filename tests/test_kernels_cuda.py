"""Copies on CUDA: side streams, events by layer, no hidden synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hicache_ray.kernels.table import copies_between
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec
from tests.kernels_matrix import CELLS, Cell, device_bytes, fill

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SPECS = {"mha": KVSpec.mha(4, 2, 64), "mla": KVSpec.mla(4, 48, 16)}
PAGES, PAGE_SIZE = 24, 16


@contextmanager
def synchronisation_refused() -> Iterator[None]:
    """Any call of torch that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def back_up_and_load(cell: Cell, device: DevicePool, host: HostPool, side: torch.cuda.Stream) -> list[torch.Tensor]:
    """Backs all pages up and erases them on a side stream, loads them there; returns what a reader beside it saw."""
    pages, host_pages = np.arange(PAGES), np.random.default_rng(2).permutation(PAGES)
    copies = copies_between(cell[0], device, host)
    plan = copies.plan(pages, host_pages)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copies.backup(plan)
        for plane in device.layers:
            for tensor in plane:
                tensor.view(torch.uint8).zero_()
        producer = device.layer_done.update_producer()
        for layer in range(device.spec.layers):
            copies.load_layer(plan, layer)
            device.layer_done.events(producer).complete(layer)
    device.layer_done.set_consumer(producer)
    return [device.key_buffer(layer).clone() for layer in range(device.spec.layers)]


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[0] != "kernel_ascend"], ids="-".join)
def test_reader_sees_each_layer_and_nobody_waits_on_the_host(cell: Cell) -> None:
    spec, side = SPECS[cell[2]], torch.cuda.Stream()
    device, host = DevicePool(spec, PAGES, PAGE_SIZE, "cuda"), HostPool(spec, PAGES, PAGE_SIZE, cell[1])
    back_up_and_load(cell, device, host, side)  # compiles what is compiled on first use
    torch.cuda.synchronize()
    fill(device, np.random.default_rng(1))
    original = device_bytes(device)
    with synchronisation_refused():
        seen = back_up_and_load(cell, device, host, side)
    assert torch.equal(device_bytes(device), original)
    for layer, keys in enumerate(seen):
        assert torch.equal(keys.view(torch.uint8), device.key_buffer(layer).view(torch.uint8))
