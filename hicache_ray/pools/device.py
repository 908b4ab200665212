"""L1: the KV of every layer in device memory, as an attention kernel reads it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hicache_ray.pools.layer_done import LayerDoneCounter
from hicache_ray.pools.layouts import KVSpec, Part
from hicache_ray.pools.memory import allocate, check_fits


class DevicePool:
    """K and V (MHA) or the latent (MLA) of `pages` pages: a tensor [pages * page_size, heads, dim] per layer and plane.

    Args:
        spec: what a token's KV is.
        pages: pages in the pool.
        page_size: tokens in a page.
        device: torch device; memory on the CPU is touched once here.
        tensors: an engine's own tensors instead of new ones: for each plane one contiguous tensor per layer, of
            pages * page_size tokens each (any shape). Raises ValueError when one does not fit the spec.

    `layer_done` is what `key_buffer`, `value_buffer` and `kv_buffer` wait on; its layers count from 0 on this rank.
    """

    def __init__(
        self,
        spec: KVSpec,
        pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        tensors: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one token, not {pages} of {page_size}")
        self.spec = spec
        self.pages = pages
        self.page_size = page_size
        self.stacked: torch.Tensor | None = None
        if tensors is None:
            self.stacked = self._allocate(torch.device(device))
            self.layers = [list(plane.unbind(0)) for plane in self.stacked.unbind(0)]
        else:
            self.layers = [[self._adopt(tensor) for tensor in plane] for plane in tensors]
            self._check_planes()
        self.device = self.layers[0][0].device
        self.layer_done = LayerDoneCounter(spec.layers, self.device)

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    def key_buffer(self, layer: int) -> torch.Tensor:
        """K of a layer (MLA: the latent), [tokens, heads, dim], once the layer has been loaded."""
        self.layer_done.wait_until(layer)
        return self.layers[0][layer]

    def value_buffer(self, layer: int) -> torch.Tensor:
        """V of a layer, [tokens, heads, dim], once it has been loaded; MLA: the latent's dims without the rope part."""
        self.layer_done.wait_until(layer)
        if self.spec.attention == "mla":
            return self.layers[0][layer][..., : self.spec.dim - self.spec.rope_dim]
        return self.layers[1][layer]

    def kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, once it has been loaded. Raises LayerTimeoutError or LayerLoadError, as all three do."""
        return self.key_buffer(layer), self.value_buffer(layer)

    def layer_pages(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Views [pages, page_size, heads, dim] of a layer, one per plane (K and V, or the latent); never waits."""
        return tuple(self._paged(plane[layer]) for plane in self.layers)

    @cached_property
    def layer_pointers(self) -> torch.Tensor:
        """Addresses of the layers' memory on the device, int64 [planes, layers], for kernels."""
        addresses = [[tensor.data_ptr() for tensor in plane] for plane in self.layers]
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def part_tensor(self, part: Part, layer: int) -> torch.Tensor:
        """View of one part of a layer, uint8 [pages, page_size, heads, dim bytes]; it may be a slice of the latent."""
        plane = self._paged(self.layers[part.plane][layer]).view(torch.uint8)
        return plane[..., part.start * self.spec.itemsize : part.stop * self.spec.itemsize]

    def stacked_bytes(self, part: Part) -> npt.NDArray[np.uint8] | None:
        """All layers of a part, [layers, pages, page_size, heads, dim bytes]; None when the tensors are an engine's."""
        if self.stacked is None:
            return None
        shape = (self.spec.layers, self.pages, self.page_size, self.spec.heads, -1)
        plane = self.stacked[part.plane].view(torch.uint8).view(shape).numpy()
        return plane[..., part.start * self.spec.itemsize : part.stop * self.spec.itemsize]

    def _paged(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.pages, self.page_size, self.spec.heads, self.spec.dim)

    def _allocate(self, device: torch.device) -> torch.Tensor:
        spec = self.spec
        shape = (spec.planes, spec.layers, self.tokens, spec.heads, spec.dim)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=spec.dtype, device=device)
        nbytes = spec.token_bytes * self.tokens
        check_fits(nbytes, what="device pool (on the CPU)")
        return torch.from_numpy(allocate(nbytes)).view(spec.dtype).view(shape)

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = (self.tokens, self.spec.heads, self.spec.dim)
        wanted = self.tokens * self.spec.heads * self.spec.dim
        if tensor.dtype != self.spec.dtype or tensor.numel() != wanted or not tensor.is_contiguous():
            raise ValueError(
                f"a layer of this pool is contiguous {self.spec.dtype} of {wanted} elements {shape}, which a tensor of "
                f"shape {tuple(tensor.shape)}, {tensor.dtype}, contiguous={tensor.is_contiguous()} is not"
            )
        return tensor.view(shape)

    def _check_planes(self) -> None:
        counts = [len(plane) for plane in self.layers]
        if counts != [self.spec.layers] * self.spec.planes:
            raise ValueError(f"{counts} tensors by plane, but the spec has {self.spec.planes} x {self.spec.layers}")
        devices = {tensor.device for plane in self.layers for tensor in plane}
        if len(devices) > 1:
            raise ValueError(f"the tensors of one pool must be on one device, not on {sorted(map(str, devices))}")
