"""Sizing (case 58), free memory, touched buffers, pinning."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache_ray.config.options import GIGABYTE as GB
from hicache_ray.pools import memory
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec
from hicache_ray.pools.memory import RESERVE_BYTES, PoolMemoryError, allocate, available_memory, check_fits, host_pages

PLENTY = 1 << 50


@pytest.mark.parametrize(
    ("device_tokens", "ratio", "size_gb", "token_bytes", "page_size", "tokens"),
    [
        (64, 2.0, 0, 128, 1, 129),
        (64, 2.0, 0, 128, 16, 144),
        (64, 1.0, 0, 128, 64, 128),
        (100, 1.2, 0, 128, 64, 128),
        (64, 2.0, 1.0, 128, 16, 7812512),
        (64, 0.5, 0, 128, 16, 48),
    ],
)
def test_case_58_capacity(
    device_tokens: int, ratio: float, size_gb: float, token_bytes: int, page_size: int, tokens: int
) -> None:
    pages = host_pages(
        device_tokens=device_tokens,
        page_size=page_size,
        token_bytes=token_bytes,
        ratio=ratio,
        size_gb=size_gb,
        available=PLENTY,
    )
    assert pages * page_size == tokens


def test_case_58_too_large_is_refused_with_the_numbers() -> None:
    with pytest.raises(PoolMemoryError, match=r"7812512 tokens x 128 bytes needs 1\.00 GB and 10\.00 GB .* 10\.50 GB"):
        host_pages(device_tokens=64, page_size=16, token_bytes=128, size_gb=1.0, available=10_500_000_000)
    assert host_pages(
        device_tokens=64, page_size=16, token_bytes=128, size_gb=1.0, reserve=GB, available=10_500_000_000
    )
    assert RESERVE_BYTES == 10 * GB


@pytest.mark.parametrize(("ratio", "size_gb"), [(0.0, 0.0), (-1.0, 0.0), (2.0, -1.0)])
def test_case_58_a_size_must_be_given(ratio: float, size_gb: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        host_pages(device_tokens=64, page_size=1, token_bytes=1, ratio=ratio, size_gb=size_gb)


def test_case_58_pool_that_does_not_fit_allocates_nothing() -> None:
    spec = KVSpec.mha(1, 1, 1 << 20, "fp32")
    with pytest.raises(PoolMemoryError, match="only .* GB of memory are available"):
        HostPool(spec, 1 << 30, 1, "page_first")


def machine(root: Path, *, available_kb: int, cgroup: str, groups: dict[str, dict[str, object]]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:  {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, files in groups.items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (root / "sys/fs/cgroup" / folder / name).write_text(f"{value}\n")
    return root


def test_free_memory_without_a_cgroup_limit(tmp_path: Path) -> None:
    groups = {"a": {"memory.max": "max", "memory.current": 5, "memory.stat": "anon 1"}}
    assert available_memory(machine(tmp_path, available_kb=1000, cgroup="0::/a\n", groups=groups)) == 1_024_000


def test_free_memory_is_limited_by_every_cgroup_above(tmp_path: Path) -> None:
    groups = {
        "a/b": {"memory.max": 900_000, "memory.current": 100_000, "memory.stat": "inactive_file 0"},
        "a": {"memory.max": 800_000, "memory.current": 300_000, "memory.stat": "anon 4\ninactive_file 50000"},
    }
    assert available_memory(machine(tmp_path, available_kb=1000, cgroup="0::/a/b\n", groups=groups)) == 550_000


def test_free_memory_in_a_version_1_cgroup(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": 700_000, "memory.usage_in_bytes": 200_000}
    groups = {"memory/a": {**files, "memory.stat": "total_inactive_file 1000"}}
    lines = "5:cpu,cpuacct:/x\n4:memory:/a\n"
    assert available_memory(machine(tmp_path, available_kb=1000, cgroup=lines, groups=groups)) == 501_000


def test_free_memory_of_a_container_that_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    groups = {"": {"memory.max": 400_000, "memory.current": 100_000, "memory.stat": "inactive_file 0"}}
    root = machine(tmp_path, available_kb=1000, cgroup="0::/docker/abc\n", groups=groups)
    assert available_memory(root) == 300_000


def test_free_memory_unknown_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PoolMemoryError, match="unknown"):
        available_memory(tmp_path)


def test_this_machine_has_memory() -> None:
    assert available_memory() > 0
    check_fits(0)


def test_buffers_are_zeroed_writable_and_resident() -> None:
    buffer = allocate((64 << 20) + 123)
    assert buffer.size == (64 << 20) + 123
    assert not buffer.any()
    resident = sum(
        int(line.split()[1]) * 1024 for line in Path("/proc/self/smaps").read_text().splitlines() if "Rss:" in line
    )
    assert resident >= buffer.size
    buffer[-1] = 3
    assert buffer[-1] == 3


def test_large_buffers_are_touched_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_TOUCH_CHUNK", 1 << 20)
    buffer = allocate((5 << 20) + 7)
    assert buffer.size == (5 << 20) + 7 and not buffer.any()


def test_views_outlive_the_pool() -> None:
    pool = HostPool(KVSpec.mha(2, 2, 4), 4, 2, "page_first", pin=False)
    view = pool.kv_buffer
    view.fill_(3)
    del pool
    gc.collect()
    assert np.all(view.float().numpy() == 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_without_cuda() -> None:
    spec = KVSpec.mha(2, 2, 4)
    assert not HostPool(spec, 4, 2, "page_first").pinned
    with pytest.raises(PoolMemoryError, match="CUDA is not available"):
        HostPool(spec, 4, 2, "page_first", pin=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pool_is_pinned_where_cuda_is_there() -> None:
    pool = HostPool(KVSpec.mha(2, 2, 4), 4, 2, "page_first")
    assert pool.pinned
    assert pool.kv_buffer.is_pinned()
