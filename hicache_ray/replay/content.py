"""What a synthetic model's KV must hold: bytes that follow from the tokens, and from nothing the cache computes.

A page's bytes depend on the namespace, on its position, on all tokens up to its end, on the layer, on K or V, and on
the rank where ranks hold different heads. The chain (xxh3 over the tokens) shares nothing with the SHA-256 page hashes,
so a mistake in a key or in a copy shows as a difference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import xxhash

from hicache_ray.hashing import Namespace
from hicache_ray.replay.requests import Tokens

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

    def extended(self, tokens: Tokens) -> TokenChain:
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


class Place(NamedTuple):
    """Where in a model a page's bytes are: `rank` is `ALL_RANKS` where every rank holds the same."""

    layer: int
    plane: int
    rank: int

    @property
    def salt(self) -> int:
        """64 bits, other ones for every place."""
        return _mix((self.layer << 24 ^ self.plane << 20 ^ self.rank + 1) + _GOLDEN)


def page_words(seeds: torch.Tensor, place: Place, page_bytes: int) -> torch.Tensor:
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


def torch_words(seeds: torch.Tensor, place: Place, count: int) -> torch.Tensor:
    """`count` 64-bit words of each page, on any device."""
    steps = torch.arange(1, count + 1, dtype=torch.int64, device=seeds.device).mul_(_signed(_GOLDEN))
    words = torch.add((seeds ^ _signed(place.salt))[:, None], steps[None, :])
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    return words.bitwise_xor_(_shifted(words, _LAST_SHIFT))


def _numpy_words(seeds: torch.Tensor, place: Place, count: int) -> torch.Tensor:
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


def page_rows(pages: torch.Tensor) -> torch.Tensor:
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
