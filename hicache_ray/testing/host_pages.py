"""A host pool (L2) for tests of storage backends: real memory in every page layout, and nothing else.

It has the members of `storage.base.HostPages`, so a backend can be tried without a cache around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache_ray.pages import Bytes, Pages

LAYOUTS_OF = {
    "mha": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "mla": ("layer_first", "page_first", "page_first_direct"),
}
"""Host memory layouts by kind of attention (case 55)."""


@dataclass(frozen=True)
class PageShape:
    """What decides the bytes of a page.

    Attributes:
        attention: `"mha"` (K and V) or `"mla"` (one latent).
        layout: byte order of the pool's memory, one of `LAYOUTS_OF[attention]`.
        page_size: tokens a page.
        layers: layers held.
        token_bytes: bytes of one token's K (or latent) in one layer; a multiple of `heads`.
        heads: KV heads on this rank; they only matter to `page_head`, which cuts a page by head.
    """

    attention: str = "mha"
    layout: str = "page_first"
    page_size: int = 2
    layers: int = 3
    token_bytes: int = 16
    heads: int = 2

    @property
    def parts(self) -> int:
        """Components of a page: K and V, or the latent alone."""
        return 2 if self.attention == "mha" else 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and components."""
        return self.parts * self.layers * self.page_size * self.token_bytes

    @property
    def segment_bytes(self) -> int:
        """Bytes of a page that lie side by side: one layer's in `layer_first`, else one component's."""
        return self.page_bytes // self.parts // (self.layers if self.layout == "layer_first" else 1)


class NumpyHostPages:
    """Host pages in one numpy array, touched once, addressed as `HostPages` says.

    `segments` has the shape [pages, layers, parts, segment_bytes] in `layer_first` and [pages, parts, segment_bytes]
    in the other layouts, where a component of a page is one run of bytes.
    """

    def __init__(self, pages: int, shape: PageShape | None = None) -> None:
        self.shape = shape or PageShape()
        self.layout = self.shape.layout
        self.page_size = self.shape.page_size
        self.pages = pages
        self.page_bytes = self.shape.page_bytes
        self.buffer: Bytes = np.zeros(pages * self.page_bytes, dtype=np.uint8)
        self.segments: Bytes = self._segments()

    def _segments(self) -> Bytes:
        parts, size = self.shape.parts, self.shape.segment_bytes
        if self.layout == "layer_first":
            return self.buffer.reshape(parts, self.shape.layers, self.pages, size).transpose(2, 1, 0, 3)
        return self.buffer.reshape(parts, self.pages, size).transpose(1, 0, 2)

    def read(self, page: int) -> Bytes:
        """A copy [page_bytes] of a page, its segments one after the other."""
        return np.ascontiguousarray(self.segments[page]).reshape(-1)

    def write(self, page: int, data: Bytes) -> None:
        """Fill a page with `data` [page_bytes]."""
        np.copyto(self.segments[page], data.reshape(self.segments.shape[1:]))

    def fill(self, pages: Pages | Sequence[int], seed: int) -> None:
        """Seeded random bytes, other ones for every page and seed."""
        for page in np.asarray(pages).tolist():
            rng = np.random.default_rng((seed, page))
            self.write(page, rng.integers(0, 256, self.page_bytes, dtype=np.uint8))
