"""Copies of the io backend `kernel_ascend`: the NPU exchanges the layer and page dims itself, so that a page moves in
one piece."""

from __future__ import annotations

import importlib

import torch

from hicache_ray.kernels.base import CopyPlan, PoolCopies, UnsupportedCopyError


def require_npu() -> None:
    """Raises UnsupportedCopyError where no Ascend NPU can be used."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise UnsupportedCopyError(
            f"io backend kernel_ascend needs an Ascend NPU, and torch_npu can't be imported ({error}); "
            "use kernel or direct"
        ) from error
    if not torch.get_device_module("npu").is_available():
        raise UnsupportedCopyError(
            "io backend kernel_ascend needs an Ascend NPU, and this machine has none; use kernel or direct"
        )


class NpuCopies(PoolCopies):
    """Copies by torch, with the dims exchanged on the device."""

    def backup(self, plan: CopyPlan) -> None:
        """All layers at once: [layers, pages, ...] becomes [pages, layers, ...] on the device."""
        layers = range(self.device_pool.spec.layers)
        for placed, host in zip(self.host_pool.geometry.parts, self.host_pool.part_tensors, strict=True):
            by_page = host.transpose(0, 1)
            device = [self.device_pool.part_tensor(placed.part, layer) for layer in layers]
            for first, host_first, length in plan.runs:
                exchanged = torch.stack([pages[first : first + length] for pages in device], dim=1)
                by_page[host_first : host_first + length].copy_(exchanged, non_blocking=True)

    def load_layer(self, plan: CopyPlan, layer: int) -> None:
        """Page by page: a layer of a page is one piece."""
        for placed, host in zip(self.host_pool.geometry.parts, self.host_pool.part_tensors, strict=True):
            device = self.device_pool.part_tensor(placed.part, layer)
            for first, host_first, length in plan.runs:
                for page in range(length):
                    device[first + page].copy_(host[layer, host_first + page], non_blocking=True)
