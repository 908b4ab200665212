"""L2: pages of KV in (pinned) host memory, laid out for copies to the device, for L3, or for both."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hicache_ray.pages import Bytes, pages_of
from hicache_ray.pools.layouts import HostLayout, KVSpec
from hicache_ray.pools.memory import allocate, check_fits, pin_buffer


class HostPool:
    """`pages` pages in one buffer, touched once, in one of the host layouts (case 55 gives their shapes).

    Args:
        spec: what a token's KV is, as in the device pool.
        pages: pages in the pool (`pools.memory.host_pages` computes it).
        page_size: tokens in a page.
        layout: layer_first, page_first, page_first_direct, page_head (MHA) or page_first_kv_split (NPU).
        pin: register the memory with CUDA: None where CUDA is there, True or an error, False never.

    Raises ValueError for a layout that the attention type has no form of, PoolMemoryError when the memory is not there.
    """

    def __init__(self, spec: KVSpec, pages: int, page_size: int, layout: str, pin: bool | None = None) -> None:
        self.geometry = HostLayout(layout, spec, pages, page_size)
        self.spec = spec
        self.pages = pages
        self.page_size = page_size
        self.layout = layout
        check_fits(self.geometry.nbytes, what="host pool")
        self.buffer: Bytes = allocate(self.geometry.nbytes)
        self.pinned = pin is not False and pin_buffer(self.buffer, self, required=pin is True)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers, K and V."""
        return self.geometry.page_bytes

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    @cached_property
    def kv_buffer(self) -> torch.Tensor:
        """The pool as one tensor, of the geometry's `shape` (case 55)."""
        return self._tensor(0, self.geometry.nbytes).view(self.geometry.shape)

    @cached_property
    def k_buffer(self) -> torch.Tensor:
        """K (MLA: the latent, or its part without rope in page_first_kv_split) as a tensor."""
        return self._part_tensor(0)

    @cached_property
    def v_buffer(self) -> torch.Tensor:
        """V (MLA in page_first_kv_split: the rope part) as a tensor. Raises ValueError where there is none."""
        if len(self.geometry.parts) < 2:
            raise ValueError(f"an MLA pool in layout {self.layout} keeps one latent and has no v_buffer")
        return self._part_tensor(1)

    @cached_property
    def part_views(self) -> tuple[Bytes, ...]:
        """For each part a uint8 view [layers, pages, page_size, heads, dim bytes], whatever the layout."""
        return tuple(placed.view(self.buffer) for placed in self.geometry.parts)

    @cached_property
    def part_tensors(self) -> tuple[torch.Tensor, ...]:
        """`part_views` as torch uint8 tensors."""
        return tuple(torch.from_numpy(view) for view in self.part_views)

    @cached_property
    def segments(self) -> Bytes:
        """The pool as pages of segments: view whose `[p]` in C order is page p as `get_page_buffer_meta` has it.

        Shape [pages, segments, bytes]; [pages, layers, 2, bytes] for MHA in layer_first. Raises ValueError for MLA in
        page_first_kv_split, whose two segments differ in size (use read_page and write_page).
        """
        return self.geometry.segments(self.buffer)

    def read_page(self, page: int) -> Bytes:
        """A contiguous copy of a page, [page_bytes] uint8."""
        return np.concatenate(self.geometry.page_pieces(self.buffer, self._checked(page)))

    def write_page(self, page: int, data: Bytes | bytes | bytearray | memoryview) -> None:
        """Fills a page from `page_bytes` bytes in the order of `read_page`. Raises ValueError for another size."""
        source = np.frombuffer(data, dtype=np.uint8)
        if source.size != self.page_bytes:
            raise ValueError(f"a page of this pool has {self.page_bytes} bytes, not {source.size}")
        done = 0
        for piece in self.geometry.page_pieces(self.buffer, self._checked(page)):
            np.copyto(piece, source[done : done + piece.size])
            done += piece.size

    def get_page_buffer_meta(self, slots: npt.ArrayLike) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the contiguous pieces of the pages that hold `slots`, for zero-copy stores (case 54).

        Raises ValueError when the slots are not whole pages of this pool.
        """
        pages = pages_of(slots, self.page_size)
        if pages.size and (pages.min() < 0 or pages.max() >= self.pages):
            raise ValueError(
                f"slots of pages {pages.min()} to {pages.max()} are not all in a pool of {self.pages} pages"
            )
        offsets, sizes = self.geometry.page_offsets(pages)
        base = self.buffer.ctypes.data
        return [base + offset for offset in offsets], sizes

    def _checked(self, page: int) -> int:
        if not 0 <= page < self.pages:
            raise ValueError(f"page {page} is not in a pool of {self.pages} pages")
        return page

    def _tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(self.buffer[offset : offset + nbytes]).view(self.spec.dtype)

    def _part_tensor(self, index: int) -> torch.Tensor:
        placed = self.geometry.parts[index]
        return self._tensor(placed.offset, placed.nbytes).view(self.geometry.part_shape(placed))
