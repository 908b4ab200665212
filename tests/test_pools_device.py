"""The device pool: shapes, views, an engine's own tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.layouts import DTYPES, KVSpec, parse_dtype
from tests.kernels_reference import poison

MHA = KVSpec.mha(layers=3, heads=2, head_dim=4)
MLA = KVSpec.mla(layers=3, kv_lora_rank=6, qk_rope_head_dim=2)


def test_token_bytes() -> None:
    assert MHA.token_bytes == 2 * 3 * 2 * 4 * 2
    assert MLA.token_bytes == 3 * 8 * 2
    assert KVSpec.mha(32, 8, 128, "fp8").token_bytes == 65536


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_has_a_pool(name: str) -> None:
    spec = KVSpec.mha(2, 3, 5, name)
    pool = DevicePool(spec, 4, 2)
    assert pool.key_buffer(1).shape == (8, 3, 5)
    assert pool.key_buffer(1).dtype == parse_dtype(name)
    assert sum(plane[layer].nbytes for plane in pool.layers for layer in range(2)) == spec.token_bytes * 8


def test_unsupported_dtype_names_those_that_work() -> None:
    with pytest.raises(ValueError, match="float64.*bf16"):
        KVSpec.mha(1, 1, 1, torch.float64)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"attention": "mamba", "layers": 2, "head_dim": 4}, "mamba"),
        ({"attention": "mha", "layers": 0, "head_dim": 4}, "layers 0"),
        ({"attention": "mla", "layers": 2, "heads": 2, "latent_dim": 4}, "heads must be 1"),
        ({"attention": "mla", "layers": 2, "latent_dim": 4, "rope_dim": 4}, "rope_dim 4"),
    ],
)
def test_impossible_specs_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KVSpec(**arguments)  # type: ignore[arg-type]


def test_views_share_the_memory() -> None:
    pool = DevicePool(MHA, 5, 2)
    keys, values = pool.layer_pages(1)
    keys[3, 1, 0, 2] = 7
    values[3, 1, 0, 2] = 8
    assert pool.key_buffer(1)[7, 0, 2] == 7
    assert pool.kv_buffer(1)[1][7, 0, 2] == 8
    assert keys.shape == (5, 2, 2, 4)


def test_mla_value_is_the_latent_without_the_rope_part() -> None:
    pool = DevicePool(MLA, 5, 2)
    pool.key_buffer(2)[:] = torch.arange(8)
    assert pool.key_buffer(2).shape == (10, 1, 8)
    assert pool.value_buffer(2).shape == (10, 1, 6)
    assert len(pool.layer_pages(2)) == 1


def test_poison_marks_those_pages_only() -> None:
    pool = DevicePool(MHA, 5, 2)
    poison(pool, np.array([1, 4]))
    poisoned = [bool(pool.layer_pages(2)[1][page].isnan().all()) for page in range(5)]
    assert poisoned == [False, True, False, False, True]
    assert not pool.layer_pages(0)[0][[0, 2, 3]].isnan().any()


def test_an_engines_tensors_are_used_in_place() -> None:
    blocks = [torch.zeros(2, 5, 2, 2, 4, dtype=torch.bfloat16) for _ in range(3)]
    pool = DevicePool(MHA, 5, 2, tensors=[[block[0] for block in blocks], [block[1] for block in blocks]])
    pool.key_buffer(2)[3] = 1
    assert blocks[2][0, 1, 1].sum() == 8
    assert pool.stacked is None


@pytest.mark.parametrize(
    ("planes", "text"),
    [
        ([[torch.zeros(10, 2, 4)] * 3] * 2, "bfloat16"),
        ([[torch.zeros(8, 2, 4, dtype=torch.bfloat16)] * 3] * 2, "80 elements"),
        ([[torch.zeros(10, 4, 2, dtype=torch.bfloat16).mT] * 3] * 2, "contiguous=False"),
        ([[torch.zeros(10, 2, 4, dtype=torch.bfloat16)] * 2] * 2, "2 x 3"),
    ],
)
def test_an_engines_tensors_must_fit(planes: list[list[torch.Tensor]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DevicePool(MHA, 5, 2, tensors=planes)


def test_empty_pools_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        DevicePool(MHA, 0, 2)
