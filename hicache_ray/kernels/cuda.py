"""Copies that a device's DMA engine carries out: one asynchronous copy for each piece that lies together on both sides.

They are put on the current stream and return at once. Pieces must be contiguous, since torch would copy others through
unpinned memory and wait for that; so a copy is cut until it is.
"""

from __future__ import annotations

import torch

from hicache_ray.kernels.base import CopyPlan, PoolCopies


class StreamCopies(PoolCopies):
    """The `direct` copies of a device with streams."""

    def backup(self, plan: CopyPlan) -> None:
        """All layers, one after the other."""
        for layer in range(self.device_pool.spec.layers):
            self._copy_layer(plan, layer, to_host=True)

    def load_layer(self, plan: CopyPlan, layer: int) -> None:
        """One layer."""
        self._copy_layer(plan, layer, to_host=False)

    def _copy_layer(self, plan: CopyPlan, layer: int, *, to_host: bool) -> None:
        for placed, tensor in zip(self.host_pool.geometry.parts, self.host_pool.part_tensors, strict=True):
            host = tensor[layer]
            device = self.device_pool.part_tensor(placed.part, layer)
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
