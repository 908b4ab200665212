"""SyntheticEngine: a model that computes nothing, but whose KV is known, so that every cached page can be checked.

Before a cached page is used it is compared, in every layer, with what it must contain; new pages are filled with that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hicache_ray.cache import HiRadixCache
from hicache_ray.pools.device import DevicePool
from hicache_ray.protocol import StepRequest
from hicache_ray.replay.content import ALL_RANKS, Place, TokenChain, page_rows, page_words
from hicache_ray.requests import Forward, Request

logger = logging.getLogger("hicache_ray.synthetic")

CHUNK_BYTES = 1 << 18
"""Bytes compared or filled at once: what is made up stays in the processor's cache."""


class _Pages(NamedTuple):
    """L1 pages and the seeds of what they must hold, on the pool's device, int64 [pages]."""

    numbers: torch.Tensor
    seeds: torch.Tensor


class SyntheticEngine:
    """An `Engine` of made-up KV.

    Args:
        cache: the rank it runs on.
        options: none are known; any is refused with ValueError.
    """

    def __init__(self, cache: HiRadixCache, options: Mapping[str, Any]) -> None:
        if options:
            raise ValueError(f"SyntheticEngine takes no options, got {', '.join(options)}")
        self.pool: DevicePool = cache.controller.device_pool
        self.rank = ALL_RANKS if self.pool.spec.attention == "mla" else cache.rank
        self._chains: dict[str, TokenChain] = {}

    def before_step(self, cache: HiRadixCache, request: StepRequest) -> None:
        """Fills the pages that the answers of the finishing requests complete."""
        numbers, seeds = [], []
        for finish in request.finishes:
            state, chain = cache.requests.get(finish.rid), self._chains.get(finish.rid)
            if state is None or chain is None or not finish.insert:
                continue
            whole = chain.extended(np.frombuffer(finish.output, dtype="<u4"))
            stop = min(whole.pages, len(state.pages))
            numbers.append(state.pages[chain.pages : stop])
            seeds.append(whole.seeds(chain.pages, stop))
        answers = self._pages(numbers, seeds)
        for layer in range(self.pool.spec.layers):
            self._fill(answers, layer)

    def forward(self, cache: HiRadixCache, batch: Forward) -> dict[str, Any]:
        """Checks the cached pages of the batch and fills the new ones, layer by layer as the layers arrive.

        Returns `pages_verified`, `pages_mismatched` and `pages_computed`, each page counted once over all layers, and
        `idle`: whether the rank has no transfer in flight.
        """
        self._chains = {rid: chain for rid, chain in self._chains.items() if rid in cache.requests}
        for request in batch.requests:
            chain = TokenChain(cache.page_size, request.namespace)
            self._chains[request.rid] = chain.extended(request.tokens)
        cached, new = self._cached(batch.requests), self._new(batch.requests)
        wrong = torch.zeros(len(cached.numbers), dtype=torch.bool, device=self.pool.device)
        layer_done = cache.controller.layer_done
        layer_done.set_consumer(batch.consumer)
        for layer in range(self.pool.spec.layers):
            layer_done.wait_until(layer)
            wrong |= self._differs(cached, layer)
            self._fill(new, layer)
        mismatched = int(wrong.sum())
        if mismatched:
            self._report(batch.requests, wrong.cpu().numpy())
        return {
            "pages_verified": len(cached.numbers),
            "pages_mismatched": mismatched,
            "pages_computed": len(new.numbers),
            "idle": cache.is_idle(),
        }

    def _cached(self, requests: Sequence[Request]) -> _Pages:
        return self._pages(
            [request.pages[: request.prefix_pages] for request in requests],
            [self._chains[request.rid].seeds(0, request.prefix_pages) for request in requests],
        )

    def _new(self, requests: Sequence[Request]) -> _Pages:
        chains = [(request, self._chains[request.rid]) for request in requests]
        return self._pages(
            [request.pages[request.prefix_pages : chain.pages] for request, chain in chains],
            [chain.seeds(request.prefix_pages, chain.pages) for request, chain in chains],
        )

    def _pages(self, numbers: Sequence[np.ndarray], seeds: Sequence[np.ndarray]) -> _Pages:
        all_numbers = np.concatenate([np.empty(0, dtype=np.int64), *numbers])
        all_seeds = np.concatenate([np.empty(0, dtype=np.uint64), *seeds]).view(np.int64)
        device = self.pool.device
        return _Pages(torch.from_numpy(all_numbers).to(device), torch.from_numpy(all_seeds).to(device))

    def _differs(self, pages: _Pages, layer: int) -> torch.Tensor:
        """bool [pages]: where a layer holds anything else than it must."""
        wrong = torch.zeros(len(pages.numbers), dtype=torch.bool, device=self.pool.device)
        for rows, place in self._places(layer):
            for part in self._chunks(len(pages.numbers)):
                held = rows[pages.numbers[part]]
                wrong[part] |= (held != page_words(pages.seeds[part], place, self._page_bytes)).any(dim=1)
        return wrong

    def _fill(self, pages: _Pages, layer: int) -> None:
        for rows, place in self._places(layer):
            for part in self._chunks(len(pages.numbers)):
                rows[pages.numbers[part]] = page_words(pages.seeds[part], place, self._page_bytes)

    def _places(self, layer: int) -> Iterator[tuple[torch.Tensor, Place]]:
        for plane, pages in enumerate(self.pool.layer_pages(layer)):
            yield page_rows(pages), Place(layer, plane, self.rank)

    @property
    def _page_bytes(self) -> int:
        return self.pool.spec.row_bytes * self.pool.page_size

    def _chunks(self, pages: int) -> Iterator[slice]:
        step = max(1, CHUNK_BYTES // self._page_bytes)
        for start in range(0, pages, step):
            yield slice(start, min(start + step, pages))

    def _report(self, requests: Sequence[Request], wrong: np.ndarray) -> None:
        first = 0
        for request in requests:
            bad = np.flatnonzero(wrong[first : first + request.prefix_pages])
            first += request.prefix_pages
            if len(bad):
                logger.error(
                    "request %s: %d of %d cached pages hold wrong bytes, the first at depth %d (L1 page %d)",
                    *(request.rid, len(bad), request.prefix_pages, bad[0], request.pages[bad[0]]),
                )
