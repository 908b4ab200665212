"""Which copies two pools get: the table of io backend, host layout and attention is the configuration's."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping

from hicache_ray.config.names import COPIES, IO_BACKENDS, MEM_LAYOUTS, can_copy
from hicache_ray.kernels.ascend import NpuCopies, require_npu
from hicache_ray.kernels.base import PoolCopies, UnsupportedCopyError
from hicache_ray.kernels.cpu import NumpyCopies
from hicache_ray.kernels.cuda import StreamCopies
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool

logger = logging.getLogger("hicache_ray.kernels.table")

REASONS: Mapping[tuple[str, str, str], str] = {
    ("direct", "page_head", "mha"): "direct copies move a token's heads together, and page_head keeps them apart",
    ("kernel", "page_head", "mla"): "an MLA latent has no heads",
    ("kernel", "page_first_direct", "mha"): "the kernel's pages are token by token",
    ("kernel", "page_first_direct", "mla"): "the kernel's pages are token by token",
    ("kernel_ascend", "layer_first", "mha"): "the NPU exchanges the dims of whole pages",
    ("kernel_ascend", "layer_first", "mla"): "the NPU exchanges the dims of whole pages",
}
"""Why there are no copies for a combination, where that can be said in a word."""

_said: set[str] = set()


def copies_between(io_backend: str, device_pool: DevicePool, host_pool: HostPool) -> PoolCopies:
    """The copies between two pools.

    `kernel` is Triton where it can run and fits, else copies like `direct`, which is said once. `direct` is the DMA
    engine on CUDA, and numpy between two pools in CPU memory.

    Raises:
        UnsupportedCopyError: there are none for this combination, or no NPU for kernel_ascend.
        ValueError: the pools do not hold the same pages.
    """
    layout = host_pool.layout
    check_copies(io_backend, layout, device_pool.spec.attention)
    if io_backend == "kernel_ascend":
        require_npu()
        return NpuCopies(device_pool, host_pool)
    if io_backend == "kernel":
        reason = why_no_triton(device_pool, host_pool)
        if reason is None:
            from hicache_ray.kernels.triton_copy import TritonCopies  # not needed where it is not used

            return TritonCopies(device_pool, host_pool)
        if reason not in _said:
            _said.add(reason)
            logger.warning("io backend kernel copies like direct here: %s", reason)
    kind = NumpyCopies if device_pool.device.type == "cpu" else StreamCopies
    return kind(device_pool, host_pool, sort_by_host=(io_backend, layout) == ("direct", "layer_first"))


def check_copies(io_backend: str, layout: str, attention: str) -> None:
    """Raises UnsupportedCopyError, with the reason and what works instead, where there are no copies (case 59)."""
    if can_copy(io_backend, layout, attention):
        return
    if io_backend not in IO_BACKENDS:
        raise UnsupportedCopyError(f"io backend {io_backend!r} is unknown; use one of {', '.join(IO_BACKENDS)}")
    if layout not in MEM_LAYOUTS:
        raise UnsupportedCopyError(f"host layout {layout!r} is unknown; use one of {', '.join(MEM_LAYOUTS)}")
    layouts = [name for name in COPIES[io_backend] if can_copy(io_backend, name, attention)]
    if not layouts:
        raise UnsupportedCopyError(f"attention {attention!r} has no copies; use mha or mla")
    reason = REASONS.get((io_backend, layout, attention))
    why = f" ({reason})" if reason else ""
    raise UnsupportedCopyError(
        f"io backend {io_backend} can't copy host layout {layout} with {attention}{why}; use {' or '.join(layouts)}"
    )


def why_no_triton(device_pool: DevicePool, host_pool: HostPool) -> str | None:
    """Why pages between these pools are not moved by Triton, or None when they are.

    On the CPU Triton runs only in its interpreter (TRITON_INTERPRET=1), which is for tests.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    on_cuda = device_pool.device.type == "cuda"
    if not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device_pool.device.type}"
    if on_cuda and not host_pool.pinned:
        return "the host pool is not pinned, so the device can't reach it"
    from hicache_ray.kernels import triton_copy  # reads its interpreter setting on import

    if triton_copy.row_shape(host_pool) is None:
        return f"rows of {triton_copy.row_bytes(host_pool)} bytes are no multiple of 4 bytes"
    return None
