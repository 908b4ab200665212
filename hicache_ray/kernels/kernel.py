"""io backend `kernel`: Triton where it can run and fits, else the copies that need none, said once."""

from __future__ import annotations

import importlib.util
import logging
import os
from types import ModuleType

from hicache_ray.kernels import direct
from hicache_ray.kernels.base import Plan

logger = logging.getLogger("hicache_ray.kernels.kernel")

_said: set[str] = set()


def backup(plan: Plan) -> None:
    """All layers of the plan's pages, L1 -> L2."""
    _operators(plan).backup(plan)


def load_layer(plan: Plan, layer: int) -> None:
    """One layer of the plan's pages, L2 -> L1."""
    _operators(plan).load_layer(plan, layer)


def why_no_triton(plan: Plan) -> str | None:
    """Why this plan's pages are not moved by Triton, or None when they are.

    On the CPU Triton runs only in its interpreter (TRITON_INTERPRET=1), which is for tests.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    on_cuda = plan.device_pool.device.type == "cuda"
    if not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {plan.device_pool.device.type}"
    if on_cuda and not plan.host_pool.pinned:
        return "the host pool is not pinned, so the device can't reach it"
    triton_copy = _triton_copy()
    if triton_copy.row_shape(plan) is None:
        return f"rows of {triton_copy.row_bytes(plan)} bytes are no multiple of 4 bytes"
    return None


def _operators(plan: Plan) -> ModuleType:
    reason = why_no_triton(plan)
    if reason is None:
        return _triton_copy()
    if reason not in _said:
        _said.add(reason)
        logger.warning("io backend kernel copies like direct here: %s", reason)
    return direct


def _triton_copy() -> ModuleType:
    # Imported here, as triton must not be needed where it is not used, and reads its interpreter setting on import.
    from hicache_ray.kernels import triton_copy

    return triton_copy
