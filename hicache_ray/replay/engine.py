"""A model that computes nothing, but whose KV is known, so that every cached page can be checked before it is used.

A page's bytes follow from the tokens, and from nothing that the cache computes. They depend on the namespace, on the
page's position, on all tokens up to its end, on the layer, on K or V, and on the rank where ranks hold different heads.
The chain (xxh3 over the tokens) shares nothing with the SHA-256 page hashes. So a mistake in a key or in a copy shows
as a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from hicache_ray.hashing import Namespace
from hicache_ray.pools.device import DevicePool
from hicache_ray.rank.cache import HiRadixCache
from hicache_ray.rank.request import Forward, Request
from hicache_ray.rank.step import StepRequest
from hicache_ray.replay.requests import TokenArray

logger = logging.getLogger("hicache_ray.synthetic")

CACHED_BYTES = 1 << 18
"""Bytes compared or filled at once: what is made up stays in the processor's cache."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
"""Constants of splitmix64: an odd step, and a finalizer in which every bit of the input changes half of the output."""

_WORD = 8

ALL_RANKS = -1
"""Rank of a place whose bytes are the same on every rank (MLA)."""


class TokenChain:
    """Page seeds of one token sequence, extended as tokens are added.

    Attributes:
        seeds: uint64, one for each whole page so far.
    """

    def __init__(self, page_size: int, namespace: Namespace) -> None:
        self.page_size = page_size
        self._hasher = xxhash.xxh3_64(repr(tuple(namespace)).encode("utf-8", "surrogatepass"))
        self._tail = np.empty(0, dtype="<u4")
        self._seeds: list[int] = []

    @property
    def pages(self) -> int:
        """Whole pages so far."""
        return len(self._seeds)

    def extended(self, tokens: TokenArray) -> TokenChain:
        """A new chain that goes on with `tokens`; this one stays as it is."""
        chain = TokenChain.__new__(TokenChain)
        chain.page_size, chain._hasher, chain._seeds = self.page_size, self._hasher.copy(), list(self._seeds)
        units = np.concatenate([self._tail, np.asarray(tokens, dtype="<u4")])
        whole = len(units) - len(units) % self.page_size
        chain._tail = units[whole:]
        data, step = memoryview(units[:whole].tobytes()), 4 * self.page_size
        for start in range(0, len(data), step):
            chain._hasher.update(data[start : start + step])
            chain._seeds.append(chain._hasher.intdigest())
        return chain

    def seeds(self, start: int, stop: int) -> np.ndarray:
        """uint64 seeds of the pages [start, stop)."""
        return np.array(self._seeds[start:stop], dtype=np.uint64)


class KVPlace(NamedTuple):
    """Where in a model a page's bytes are: `rank` is `ALL_RANKS` where every rank holds the same."""

    layer: int
    plane: int
    rank: int

    @property
    def salt(self) -> int:
        """64 bits, other ones for every place."""
        return _mix((self.layer << 24 ^ self.plane << 20 ^ self.rank + 1) + _GOLDEN)


def page_words(seeds: torch.Tensor, place: KVPlace, page_bytes: int) -> torch.Tensor:
    """What pages must hold at a place.

    Args:
        seeds: int64 [pages], bit patterns of the pages' seeds.
        place: layer, plane and rank.
        page_bytes: bytes of a page in one layer and plane.

    Returns:
        int64 [pages, page_bytes / 8] where 8 divides page_bytes, else uint8 [pages, page_bytes]; on the seeds' device.
    """
    count = -(-page_bytes // _WORD)
    words = _numpy_words(seeds, place, count) if seeds.device.type == "cpu" else torch_words(seeds, place, count)
    if page_bytes % _WORD == 0:
        return words
    return words.view(torch.uint8)[:, :page_bytes]


def torch_words(seeds: torch.Tensor, place: KVPlace, count: int) -> torch.Tensor:
    """`count` 64-bit words of each page, on any device."""
    steps = torch.arange(1, count + 1, dtype=torch.int64, device=seeds.device).mul_(_signed(_GOLDEN))
    words = torch.add((seeds ^ _signed(place.salt))[:, None], steps[None, :])
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    return words.bitwise_xor_(_shifted(words, _LAST_SHIFT))


def _numpy_words(seeds: torch.Tensor, place: KVPlace, count: int) -> torch.Tensor:
    """As `torch_words`, on the CPU in 0.4 of the time: numpy has vectorised shifts of 64-bit integers."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    words = np.add.outer(seeds.numpy().view(np.uint64) ^ np.uint64(place.salt), steps)
    shifted = np.empty_like(words)
    for shift, factor in _ROUNDS:
        np.right_shift(words, np.uint64(shift), out=shifted)
        np.bitwise_xor(words, shifted, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    np.right_shift(words, np.uint64(_LAST_SHIFT), out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    return torch.from_numpy(words.view(np.int64))


def word_rows(pages: torch.Tensor) -> torch.Tensor:
    """A pool's view [pages, page_size, heads, dim] in the form of `page_words`: the same memory, one row a page."""
    rows = pages.view(pages.shape[0], -1).view(torch.uint8)
    return rows.view(torch.int64) if rows.shape[1] % _WORD == 0 else rows


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 with the sign; the mask makes it the shift of an unsigned number.
    return torch.bitwise_right_shift(words, bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(number: int) -> int:
    number &= _MASK
    for shift, factor in _ROUNDS:
        number = (number ^ number >> shift) * factor & _MASK
    return number ^ number >> _LAST_SHIFT


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


class _Pages(NamedTuple):
    """L1 pages and the seeds of what they must hold, on the pool's device, int64 [pages]."""

    numbers: torch.Tensor
    seeds: torch.Tensor


class SyntheticEngine:
    """An `Engine` of made-up KV: compares cached pages with what they must hold, in every layer, and fills new ones.

    Args:
        cache: the rank it runs on.
        options: none are known; any is refused with ValueError.
    """

    def __init__(self, cache: HiRadixCache, options: Mapping[str, Any]) -> None:
        if options:
            raise ValueError(f"SyntheticEngine takes no options, got {', '.join(options)}")
        self.pool: DevicePool = cache.mover.device_pool
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
        layer_done = cache.mover.layer_done
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

    def _places(self, layer: int) -> Iterator[tuple[torch.Tensor, KVPlace]]:
        for plane, pages in enumerate(self.pool.layer_pages(layer)):
            yield word_rows(pages), KVPlace(layer, plane, self.rank)

    @property
    def _page_bytes(self) -> int:
        return self.pool.spec.row_bytes * self.pool.page_size

    def _chunks(self, pages: int) -> Iterator[slice]:
        step = max(1, CACHED_BYTES // self._page_bytes)
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
