"""The table of copies: what is in it, what is refused and why (cases 54, 59), and what every copy checks."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ray.kernels import cpu
from hicache_ray.kernels.base import CopyRun, UnsupportedCopyError, runs_of
from hicache_ray.kernels.table import check_copies, copies_between
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec
from tests.kernels_matrix import CELLS, device_bytes, fill
from tests.kernels_reference import poison

SPEC = KVSpec.mha(layers=3, heads=2, head_dim=4)


def pools(layout: str = "page_first", pages: int = 6, page_size: int = 2) -> tuple[DevicePool, HostPool]:
    return DevicePool(SPEC, pages, page_size), HostPool(SPEC, pages, page_size, layout, pin=False)


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_the_table_holds_every_cell_that_is_promised() -> None:
    cells = set(CELLS)
    kernel, direct = ("layer_first", "page_first", "page_head"), ("layer_first", "page_first_direct")
    for attention in ("mha", "mla"):
        wanted = {("kernel", layout, attention) for layout in kernel} - {("kernel", "page_head", "mla")}
        wanted |= {("direct", layout, attention) for layout in direct}
        wanted |= {("kernel_ascend", layout, attention) for layout in ("page_first_direct", "page_first_kv_split")}
        assert wanted <= cells
        cells -= wanted
    assert cells == {("direct", "page_first", "mha"), ("direct", "page_first", "mla")}


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (("direct", "page_head", "mha"), "keeps them apart.*use layer_first or page_first_direct or page_first"),
        (("kernel_ascend", "layer_first", "mha"), "whole pages.*use page_first_direct or page_first_kv_split"),
        (("kernel", "page_head", "mla"), "no heads.*use layer_first or page_first"),
        (("kernel", "page_first_direct", "mha"), "token by token"),
        (("direct", "page_first_kv_split", "mla"), "can't copy host layout page_first_kv_split with mla; use"),
        (("rdma", "page_first", "mha"), "'rdma' is unknown; use one of kernel, direct, kernel_ascend"),
        (("direct", "column_first", "mha"), "'column_first' is unknown; use one of layer_first"),
        (("direct", "page_first", "swa"), "'swa' has no copies"),
    ],
)
def test_case_59_what_cannot_work_is_refused_with_the_reason(cell: tuple[str, str, str], text: str) -> None:
    with pytest.raises(UnsupportedCopyError, match=text):
        check_copies(*cell)


def test_ascend_is_refused_at_once_where_no_npu_is() -> None:
    with pytest.raises(UnsupportedCopyError, match="kernel_ascend needs an Ascend NPU.*use kernel or direct"):
        copies_between("kernel_ascend", *pools("page_first_direct"))


def test_layer_first_direct_sorts_by_host_address() -> None:
    plan = copies_between("direct", *pools("layer_first")).plan(pages(4, 0, 2, 1), pages(3, 5, 2, 0))
    assert plan.host_pages.tolist() == [0, 2, 3, 5]
    assert plan.device_pages.tolist() == [1, 2, 4, 0]


def test_runs_join_neighbours_on_both_sides() -> None:
    assert runs_of(pages(4, 5, 6, 0, 1), pages(1, 2, 3, 4, 6)) == [CopyRun(4, 1, 3), CopyRun(0, 4, 1), CopyRun(1, 6, 1)]
    assert runs_of(pages(2, 1), pages(2, 1)) == [CopyRun(2, 2, 1), CopyRun(1, 1, 1)]
    assert runs_of(pages(), pages()) == []


@pytest.mark.parametrize(
    ("device_pages", "host_pages", "text"),
    [
        (pages(0, 1), pages(0), "equal length"),
        (pages(0, 6), pages(0, 1), "device pages 0 to 6 are not all in a pool of 6"),
        (pages(0, 1), pages(-1, 1), "host pages -1 to 1"),
        (pages(0)[None], pages(0)[None], "equal length"),
    ],
)
def test_pages_are_checked_before_any_byte_moves(device_pages: np.ndarray, host_pages: np.ndarray, text: str) -> None:
    for layout in ("page_first", "layer_first"):
        device, host = pools(layout)
        with pytest.raises(ValueError, match=text):
            copies_between("direct", device, host).plan(device_pages, host_pages)


def test_pools_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="do not hold the same pages"):
        copies_between("direct", DevicePool(SPEC, 4, 3), pools()[1])


def test_no_pages_is_no_copy() -> None:
    for cell in (cell for cell in CELLS if cell[0] != "kernel_ascend" and cell[2] == "mha"):
        device, host = pools(cell[1])
        copies = copies_between(cell[0], device, host)
        copies.backup(copies.plan(pages(), pages()))
        copies.load_layer(copies.plan(pages(), pages()), 2)
        assert not host.buffer.any()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_load_touches_its_layer_only(layout: str) -> None:
    device, host = pools(layout)
    host.buffer[:] = 9
    copies = copies_between("direct", device, host)
    copies.load_layer(copies.plan(pages(1, 4), pages(0, 2)), 1)
    loaded = device_bytes(device).view(2, 3, 6, -1)
    assert [bool((loaded[:, layer] == 0).all()) for layer in range(3)] == [True, False, True]
    assert [bool((loaded[:, 1, page] == 9).all()) for page in range(6)] == [False, True, False, False, True, False]


@pytest.mark.parametrize("small_run", [0, 1 << 60])
@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_shared_copies_round_trip(layout: str, adopted: bool, small_run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads, runs that are cut between them, an engine's own tensors: the same bytes come back."""
    monkeypatch.setattr(cpu, "SHARED_BYTES", 1)
    monkeypatch.setattr(cpu, "SMALL_RUN", small_run)
    before = cpu.set_copy_threads(3)
    try:
        device, host = pools(layout, pages=20)
        fill(device, np.random.default_rng(7))
        if adopted:
            device = DevicePool(SPEC, 20, 2, tensors=device.layers)
        original = device_bytes(device)
        device_pages = np.concatenate([np.arange(3, 14), pages(0, 19, 1)])
        host_pages = np.concatenate([np.arange(5, 16), pages(3, 0, 17)])
        copies = copies_between("direct", device, host)
        plan = copies.plan(device_pages, host_pages)
        copies.backup(plan)
        poison(device, device_pages)
        assert not bool((device_bytes(device) == original).all())
        for layer in range(3):
            copies.load_layer(plan, layer)
        assert bool((device_bytes(device) == original).all())
    finally:
        cpu.set_copy_threads(before)


def test_error_of_any_share_reaches_the_caller() -> None:
    before = cpu.set_copy_threads(2)

    def work(start: int, stop: int) -> None:
        if start:
            raise OSError("bus error")

    try:
        with pytest.raises(OSError, match="bus error"):
            cpu.share(work, 10, cpu.SHARED_BYTES)
    finally:
        cpu.set_copy_threads(before)
    with pytest.raises(ValueError, match="at least 1 thread"):
        cpu.set_copy_threads(0)
