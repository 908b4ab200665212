"""Copies that a device's DMA engine carries out: one asynchronous copy for each piece that lies together on both sides.

They are put on the current stream and return at once. Pieces must be contiguous, since torch would copy others through
unpinned memory and wait for that; so a copy is cut until it is.
"""

from __future__ import annotations

import torch

from hicache_ray.kernels.base import Plan


def backup(plan: Plan) -> None:
    """All layers of the plan's pages, L1 -> L2."""
    for layer in range(plan.device_pool.spec.layers):
        _copy_layer(plan, layer, to_host=True)


def load_layer(plan: Plan, layer: int) -> None:
    """One layer of the plan's pages, L2 -> L1."""
    _copy_layer(plan, layer, to_host=False)


def _copy_layer(plan: Plan, layer: int, *, to_host: bool) -> None:
    for placed, tensor in zip(plan.host_pool.geometry.parts, plan.host_pool.part_tensors, strict=True):
        host = tensor[layer]
        device = plan.device_pool.part_tensor(placed.part, layer)
        for first, host_first, length in plan.runs:
            in_host = host[host_first : host_first + length]
            in_device = device[first : first + length]
            if to_host:
                _copy_pieces(in_host, in_device)
            else:
                _copy_pieces(in_device, in_host)


def _copy_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    for target_piece, source_piece in zip(target.unbind(0), source.unbind(0), strict=True):
        _copy_pieces(target_piece, source_piece)
