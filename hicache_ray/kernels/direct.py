"""io backend `direct`: the device's DMA engine on CUDA, numpy between two pools on the CPU."""

from __future__ import annotations

from types import ModuleType

from hicache_ray.kernels import host_copy, stream_copy
from hicache_ray.kernels.base import Plan


def backup(plan: Plan) -> None:
    """All layers of the plan's pages, L1 -> L2."""
    _operators(plan).backup(plan)


def load_layer(plan: Plan, layer: int) -> None:
    """One layer of the plan's pages, L2 -> L1."""
    _operators(plan).load_layer(plan, layer)


def _operators(plan: Plan) -> ModuleType:
    return host_copy if plan.device_pool.device.type == "cpu" else stream_copy
