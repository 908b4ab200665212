"""Keys: whole pages of tokens, in a namespace."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace, TokenRangeError, bigram_units, page_hashes
from hicache_ray.index import IndexOptions, TieredIndex
from hicache_ray.radix.key import Key
from hicache_ray.radix.tree import KeyKindError


def test_the_tail_that_fills_no_page_is_cut() -> None:
    """Case 20. Unaligned input is not an error: six tokens at page 4 are one page."""
    key = Key.of(np.arange(6, dtype=np.int64), 4)
    assert (key.pages, key.units) == (1, np.arange(4, dtype="<u4").tobytes())
    assert Key.of([1, 2, 3], 4).pages == 0


@pytest.mark.parametrize("dtype", ["<u4", "<i4", "<i8", "<u8"])
def test_the_same_tokens_make_the_same_key(dtype: str) -> None:
    tokens = np.array([0, 1, 2**31 - 1, 7], dtype=dtype)
    assert Key.of(tokens, 2) == Key.of(tokens.tolist(), 2) == Key.of(tokens.astype("<u4").tobytes(), 2)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_out_of_range_are_refused(token: int) -> None:
    """Case 4. A token that would be cut to 32 bits would name another prompt's pages."""
    with pytest.raises(TokenRangeError, match=str(token)):
        Key.of(np.array([1, token], dtype=np.int64), 1)


def test_page_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size is 0"):
        Key.of([1], 0)


def test_a_prefix_keeps_namespace_and_kind() -> None:
    """D10. What is cut off a bigram key still is a bigram key, hashed as one."""
    namespace = Namespace(adapter="a")
    key = Key.of([1, 2, 3, 4, 5, 6, 7], 2, namespace=namespace, bigram=True)
    part = key.prefix(2)
    assert (part.bigram, part.namespace, part.pages, part.page_bytes) == (True, namespace, 2, 16)
    assert part.units == bigram_units([1, 2, 3, 4, 5])
    whole = page_hashes(key.units, 2, namespace=namespace, bigram=True)
    assert page_hashes(part.units, 2, namespace=namespace, bigram=True) == whole[:2]
    assert key.prefix(9) is key and key.prefix(0).pages == 0


def test_starts_with_compares_bytes_and_namespace() -> None:
    key, other = Key.of([1, 2, 3, 4], 1), Key.of([1, 2, 9], 1)
    assert key.starts_with(other, 2) and key.starts_with(other, 0)
    assert not key.starts_with(other, 3)
    assert not other.starts_with(key, 4)
    assert not key.starts_with(Key.of([1, 2], 1, namespace=Namespace(tenant="t")), 1)


def test_prefixes_of_one_key_know_each_other() -> None:
    key = Key.of([1, 2, 3, 4, 5], 1)
    long, short = key.prefix(4), key.prefix(4).prefix(2)
    assert long.cut_from is short.cut_from is key and key.cut_from is None
    assert key.starts_with(short, 2) and long.starts_with(key, 4) and short.starts_with(long, 2)
    assert not short.starts_with(long, 3)


def test_keys_are_values() -> None:
    assert len({Key.of([1, 2], 1), Key.of([1, 2], 1), Key.of([1, 2], 2)}) == 2
    assert Key.of([1], 1) != Key.of([1], 1, namespace=Namespace(salt="s"))
    assert Key.of([1], 1) != b"1" and "1 pages" in repr(Key.of([1], 1))
    assert Key.of([1], 1).namespace == EMPTY_NAMESPACE


def test_a_key_of_another_page_size_is_refused() -> None:
    index = TieredIndex(IndexOptions(page_size=4, device_pages=4, host_pages=0))
    with pytest.raises(KeyKindError, match="pages of 8 bytes, the tree pages of 16"):
        index.match(Key.of([1, 2, 3, 4], 2))
