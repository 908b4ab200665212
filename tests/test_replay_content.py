"""What a synthetic model's KV must hold: it follows from everything it should, and from nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.replay.engine import ALL_RANKS, KVPlace, TokenChain, page_words, torch_words, word_rows

TOKENS = np.arange(100, 164, dtype=np.uint32)


def seeds(tokens: np.ndarray = TOKENS, page_size: int = 8, namespace: Namespace = EMPTY_NAMESPACE) -> list[int]:
    chain = TokenChain(page_size, namespace).extended(tokens)
    return chain.seeds(0, chain.pages).tolist()


def test_a_page_depends_on_all_tokens_up_to_its_end() -> None:
    changed = TOKENS.copy()
    changed[20] += 1
    before, after = seeds(), seeds(changed)
    assert len(before) == 8
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True] + [False] * 6


def test_equal_pages_at_other_positions_differ() -> None:
    assert len(set(seeds(np.zeros(64, dtype=np.uint32)))) == 8


def test_namespaces_differ() -> None:
    names = [EMPTY_NAMESPACE, Namespace(adapter=""), Namespace("a", "bc"), Namespace("ab", "c"), Namespace(tenant="a")]
    assert len({seeds(namespace=name)[0] for name in names}) == len(names)


def test_a_chain_goes_on_as_if_it_had_never_stopped() -> None:
    chain = TokenChain(8, EMPTY_NAMESPACE).extended(TOKENS[:13])
    longer = chain.extended(TOKENS[13:30]).extended(TOKENS[30:])
    assert longer.seeds(0, longer.pages).tolist() == seeds()
    assert chain.pages == 1
    assert chain.extended(TOKENS[13:]).seeds(0, 8).tolist() == seeds()


def as_tensor(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64))


def test_layers_planes_and_ranks_differ() -> None:
    some = as_tensor(seeds()[:1])
    places = [KVPlace(layer, plane, rank) for layer in range(4) for plane in range(2) for rank in (ALL_RANKS, 0, 1, 7)]
    assert len({page_words(some, place, 64).numpy().tobytes() for place in places}) == len(places)


@pytest.mark.parametrize("page_bytes", [8, 64, 20, 7, 513])
def test_words_have_the_size_of_a_page_and_all_differ(page_bytes: int) -> None:
    words = page_words(as_tensor(seeds()), KVPlace(1, 0, 0), page_bytes)
    assert words.shape[0] == 8 and words.numel() * words.element_size() == 8 * page_bytes
    assert len({row.numpy().tobytes() for row in words}) == 8


def test_numpy_and_torch_agree() -> None:
    values, place = as_tensor(seeds()), KVPlace(3, 1, 5)
    assert torch.equal(page_words(values, place, 160), torch_words(values, place, 20))


@pytest.mark.parametrize(("dim", "dtype"), [(4, torch.bfloat16), (3, torch.int8), (5, torch.float32)])
def test_rows_are_the_pools_memory(dim: int, dtype: torch.dtype) -> None:
    pages = torch.zeros((6, 2, 2, dim), dtype=dtype)
    rows = word_rows(pages)
    rows[torch.tensor([4])] = page_words(as_tensor(seeds()[:1]), KVPlace(0, 0, 0), 4 * dim * dtype.itemsize)
    touched = pages.view(torch.uint8).flatten(1).any(dim=1)
    assert touched.tolist() == [False] * 4 + [True, False]
