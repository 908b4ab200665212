"""What one token's KV is, and where its bytes lie in L2: the host memory layouts.

Every layout is one order of the same axes, so everything else (shapes, pointers, views, storage byte order) follows
from the order: L layer, P page, T token of the page, H head, D dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from hicache_ray.config.names import KV_DTYPES
from hicache_ray.pages import Bytes, Pages

Attention = Literal["mha", "mla"]

_SHORT_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8": "float8_e4m3fn", "int8": "int8"}
DTYPES: dict[str, torch.dtype] = {
    **{name: getattr(torch, name) for name in KV_DTYPES.values()},
    **{name: getattr(torch, torch_name) for name, torch_name in (KV_DTYPES | _SHORT_NAMES).items()},
}
"""Dtypes of a KV cache under every name that is taken: the configuration's, torch's and short ones."""


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a KV cache; raises ValueError for one that no pool holds."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in set(DTYPES.values()):
        raise ValueError(f"KV dtype {dtype!r} is not supported; use one of {', '.join(sorted(DTYPES))}")
    assert found is not None
    return found


@dataclass(frozen=True)
class Part:
    """What a host layout keeps together of a token and layer: dims [start, stop) of plane 0 (K, latent) or 1 (V)."""

    plane: int
    start: int
    stop: int

    @property
    def dims(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class KVSpec:
    """KV of one token on one rank. `heads` are the local heads (after the tensor-parallel split).

    MHA (with GQA and MQA) keeps K and V of `heads` x `head_dim`; MLA one latent of `latent_dim` (kv_lora_rank +
    qk_rope_head_dim), whose last `rope_dim` dims only page_first_kv_split keeps apart. `mha` and `mla` build one.
    """

    attention: Attention
    layers: int
    heads: int = 1
    head_dim: int = 0
    latent_dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    rope_dim: int = 0

    def __post_init__(self) -> None:
        if self.attention not in ("mha", "mla"):
            raise ValueError(f"attention {self.attention!r} has no pool; use 'mha' or 'mla' (SWA and Mamba have none)")
        parse_dtype(self.dtype)
        if self.layers < 1 or self.heads < 1 or self.dim < 1:
            raise ValueError(f"layers {self.layers}, heads {self.heads} and dim {self.dim} must all be at least 1")
        if self.attention == "mla" and self.heads != 1:
            raise ValueError(f"MLA has one shared latent, so heads must be 1, not {self.heads}")
        if not 0 <= self.rope_dim < self.dim:
            raise ValueError(f"rope_dim {self.rope_dim} must lie within the {self.dim} dims of the latent")

    @classmethod
    def mha(cls, layers: int, heads: int, head_dim: int, dtype: str | torch.dtype = torch.bfloat16) -> KVSpec:
        """K and V of `heads` local heads."""
        return cls("mha", layers, heads=heads, head_dim=head_dim, dtype=parse_dtype(dtype))

    @classmethod
    def mla(
        cls, layers: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: str | torch.dtype = torch.bfloat16
    ) -> KVSpec:
        """One latent per token and layer, the same on every rank."""
        latent = kv_lora_rank + qk_rope_head_dim
        return cls("mla", layers, latent_dim=latent, rope_dim=qk_rope_head_dim, dtype=parse_dtype(dtype))

    @property
    def dim(self) -> int:
        """Dims of one head (MHA) or of the latent (MLA)."""
        return self.head_dim if self.attention == "mha" else self.latent_dim

    @property
    def planes(self) -> int:
        """Tensors a layer has on the device: K and V, or the latent."""
        return 2 if self.attention == "mha" else 1

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one token, one layer, one plane."""
        return self.heads * self.dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers, K and V."""
        return self.planes * self.layers * self.row_bytes


ORDERS: dict[str, str] = {
    "layer_first": "LPTHD",
    "page_first": "PTLHD",
    "page_first_direct": "PLTHD",
    "page_head": "PHTLD",
    "page_first_kv_split": "PLTHD",
}
_AXIS_NAMES = {"L": "layer", "T": "token", "H": "head"}


def check_layout(layout: str, spec: KVSpec) -> None:
    """Raises ValueError for an unknown layout and for one that the attention type has no form of (case 54)."""
    if layout not in ORDERS:
        raise ValueError(f"host layout {layout!r} is unknown; use one of {', '.join(ORDERS)}")
    if layout == "page_head" and spec.attention == "mla":
        raise ValueError("host layout page_head splits by head, and an MLA latent has none; use page_first")
    if layout == "page_first_kv_split" and spec.attention == "mla" and not spec.rope_dim:
        raise ValueError("host layout page_first_kv_split with MLA needs rope_dim (qk_rope_head_dim) in the KVSpec")


def parts_of(layout: str, spec: KVSpec) -> tuple[Part, ...]:
    """The separately kept parts of a token, in page order: K and V, the latent, or the latent's two halves."""
    if spec.attention == "mha":
        return (Part(0, 0, spec.dim), Part(1, 0, spec.dim))
    if layout == "page_first_kv_split":
        cut = spec.dim - spec.rope_dim
        return (Part(0, 0, cut), Part(0, cut, spec.dim))
    return (Part(0, 0, spec.dim),)


@dataclass(frozen=True)
class PartLayout:
    """Where one part lies: its offset in the buffer, its bytes, and the byte stride of each of the axes L P T H D."""

    part: Part
    offset: int
    nbytes: int
    sizes: dict[str, int]
    strides: dict[str, int]

    def view(self, buffer: Bytes) -> Bytes:
        """Zero-copy view of this part: [layers, pages, page_size, heads, dim bytes], strided as the layout lies."""
        shape = tuple(self.sizes[axis] for axis in "LPTHD")
        strides = tuple(self.strides[axis] for axis in "LPTHD")
        region = buffer[self.offset : self.offset + self.nbytes]
        return np.lib.stride_tricks.as_strided(region, shape, strides)


@dataclass(frozen=True)
class HostLayout:
    """Geometry of a host pool of `pages` pages; raises ValueError where `check_layout` does."""

    name: str
    spec: KVSpec
    pages: int
    page_size: int

    def __post_init__(self) -> None:
        check_layout(self.name, self.spec)
        if self.pages < 1 or self.page_size < 1:
            raise ValueError(f"a pool needs at least one page of one token, not {self.pages} of {self.page_size}")

    @property
    def page_bytes(self) -> int:
        return self.spec.token_bytes * self.page_size

    @property
    def nbytes(self) -> int:
        return self.page_bytes * self.pages

    @cached_property
    def parts(self) -> tuple[PartLayout, ...]:
        """The parts in page order; part i begins where part i - 1 ends."""
        out: list[PartLayout] = []
        offset = 0
        for part in parts_of(self.name, self.spec):
            placed = self._place(part, offset)
            out.append(placed)
            offset += placed.nbytes
        return tuple(out)

    def _place(self, part: Part, offset: int) -> PartLayout:
        spec = self.spec
        sizes = dict(L=spec.layers, P=self.pages, T=self.page_size, H=spec.heads, D=part.dims * spec.itemsize)
        strides: dict[str, int] = {}
        step = 1
        for axis in reversed(ORDERS[self.name]):
            strides[axis] = step
            step *= sizes[axis]
        return PartLayout(part, offset, step, sizes, strides)

    def part_shape(self, placed: PartLayout) -> tuple[int, ...]:
        """Tensor shape of one part: neighbouring page and token axes are one axis of slots (case 55)."""
        sizes = {**placed.sizes, "S": self.pages * self.page_size, "D": placed.part.dims}
        return tuple(sizes[axis] for axis in ORDERS[self.name].replace("PT", "S"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole buffer (case 55); MLA with page_first_kv_split has two buffers and no common shape."""
        shapes = [self.part_shape(placed) for placed in self.parts]
        if self.spec.attention == "mha":
            return (len(shapes), *shapes[0])
        if len(shapes) > 1:
            raise ValueError("page_first_kv_split keeps two MLA buffers of different widths; use k_buffer and v_buffer")
        return shapes[0]

    @property
    def byte_order(self) -> str:
        """Name of the byte order inside a stored page (case 56): pages may be exchanged where it is equal."""
        axes = [_AXIS_NAMES[axis] for axis in ORDERS[self.name] if axis in _AXIS_NAMES]
        if self.spec.attention == "mla":
            axes.remove("head")
        if len(self.parts) > 1:
            axes.insert(1 if self.name == "layer_first" else 0, "part" if self.spec.attention == "mla" else "kv")
        return ".".join(axes)

    def page_offsets(self, pages: Pages) -> tuple[list[int], list[int]]:
        """Byte offsets and sizes of the contiguous pieces of pages, page by page (case 54).

        layer_first: one piece per layer and part, K then V within a layer. The page layouts: one piece per part.
        """
        if self.name == "layer_first":
            layer = np.arange(self.spec.layers)[:, None] * self.parts[0].strides["L"]
            pieces = (layer + np.array([placed.offset for placed in self.parts])).reshape(-1)
            sizes = [self.page_size * self.spec.row_bytes] * len(pieces)
            offsets = pages[:, None] * self.parts[0].strides["P"] + pieces
        else:
            bases = np.array([placed.offset for placed in self.parts])
            sizes = [placed.strides["P"] for placed in self.parts]
            offsets = pages[:, None] * np.array(sizes) + bases
        return offsets.reshape(-1).tolist(), sizes * len(pages)

    def segments(self, buffer: Bytes) -> Bytes:
        """Zero-copy uint8 view whose entry p, read in C order, is page p in the order of `page_offsets`.

        Shape [pages, parts, bytes] for the page layouts; [pages, layers, bytes] for layer_first with one part; [pages,
        layers, 2, bytes] for layer_first with K and V, whose pieces alternate between two regions and so have no common
        stride. Raises ValueError for MLA in page_first_kv_split: its two pieces of a page differ in size.
        """
        first = self.parts[0]
        if self.name == "layer_first":
            shape = [self.pages, self.spec.layers, len(self.parts), self.page_size * self.spec.row_bytes]
            strides = [first.strides["P"], first.strides["L"], first.nbytes, 1]
            if len(self.parts) == 1:
                del shape[2], strides[2]
        else:
            if len({placed.strides["P"] for placed in self.parts}) > 1:
                raise ValueError(
                    "an MLA page in page_first_kv_split is two pieces of different sizes; use read_page and "
                    "write_page, or the layout page_first_direct"
                )
            shape = [self.pages, len(self.parts), first.strides["P"]]
            strides = [first.strides["P"], first.nbytes, 1]
        return np.lib.stride_tricks.as_strided(buffer, shape, strides)

    def page_pieces(self, buffer: Bytes, page: int) -> list[Bytes]:
        """The contiguous pieces of one page as views, in page order."""
        offsets, sizes = self.page_offsets(np.array([page], dtype=np.int64))
        return [buffer[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
