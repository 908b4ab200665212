"""HiCacheConfig: values, arithmetic, and what the options make of the model and its parallel shape."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import pytest

from hicache_ray.config import (
    ConfigError,
    HiCacheConfig,
    prefetch_timeout_per_page,
)
from hicache_ray.config.names import add_storage_backend
from hicache_ray.config.option import options_of
from hicache_ray.rank.prefetch import PrefetchPolicy


def test_defaults_are_sglangs():
    config = HiCacheConfig()
    assert (config.page_size, config.hicache_ratio, config.hicache_size) == (1, 2.0, 0)
    assert config.hicache_write_policy == "write_through"
    assert (config.hicache_io_backend, config.hicache_mem_layout) == ("kernel", "layer_first")
    assert config.hicache_storage_backend is None
    assert config.hicache_storage_prefetch_policy == "best_effort"
    assert config.radix_eviction_policy == "lru"
    assert (config.prefetch_threshold, config.prefetch_timeout_base) == (256, 1.0)
    assert config.prefetch_timeout_per_ki_token == 0.25
    assert config.hicache_storage_pass_prefix_keys is False
    assert config.load_back_threshold == 10


@pytest.mark.parametrize(
    "threshold, page_size, expected",
    [(1, 2, 2), (10, 2, 10), (256, 1, 256), (256, 512, 512)],
    ids=["case_43_clamped", "case_43_above_a_page", "case_43_default", "case_43_large_page"],
)
def test_prefetch_threshold_is_at_least_one_page(threshold, page_size, expected):
    config = HiCacheConfig(prefetch_threshold=threshold, page_size=page_size)
    assert (config.prefetch_min_tokens, config.prefetch_threshold) == (expected, threshold)


@pytest.mark.parametrize(
    "page_size, seconds", [(2, 0.00048828125), (64, 0.015625)], ids=["case_46_page_2", "case_46_page_64"]
)
def test_prefetch_timeout_per_page(page_size, seconds):
    assert prefetch_timeout_per_page(page_size, 0.25) == seconds
    assert HiCacheConfig(page_size=page_size).prefetch_timeout_per_page == seconds


@pytest.mark.parametrize(
    "base, hit_pages, seconds",
    [(1.0, 256, 5.0), (1.0, 0, 1.0), (0.3, 0, 0.3)],
    ids=["case_46_256_pages", "case_46_before_the_query", "case_46_base"],
)
def test_prefetch_timeout(base, hit_pages, seconds):
    config = HiCacheConfig(page_size=64, prefetch_timeout_base=base, prefetch_timeout_per_ki_token=0.25)
    policy = PrefetchPolicy(
        name="timeout", threshold=1, page_size=64, timeout_base=config.prefetch_timeout_base,
        timeout_per_page=config.prefetch_timeout_per_page, hard_limit=60.0, capacity_pages=1,
    )  # fmt: skip
    assert policy.timeout(hit_pages) == seconds


BAD_VALUES = [
    ({"page_size": 0}, "page_size is 0; it must be at least 1"),
    ({"page_size": 1.5}, "page_size is 1.5; give a whole number"),
    ({"page_size": True}, "page_size is True; give a whole number"),
    ({"page_size": "64"}, "page_size is '64'; give a whole number"),
    ({"enable_eagle": 1}, "enable_eagle is 1; give true or false"),
    ({"model_name": None}, "model_name is None; give text"),
    ({"hicache_ratio": 0}, "hicache_ratio is 0.0; it must be above 0"),
    ({"hicache_ratio": float("nan")}, "hicache_ratio is nan; give a finite number"),
    ({"hicache_size": -1}, "hicache_size is -1.0; it must be at least 0"),
    (
        {"hicache_write_policy": "writethrough"},
        "hicache_write_policy is 'writethrough'; use one of write_through, write_through_selective, write_back",
    ),
    ({"hicache_io_backend": "dma"}, "hicache_io_backend is 'dma'; use one of kernel, direct, kernel_ascend"),
    ({"hicache_mem_layout": "head_first"}, "hicache_mem_layout is 'head_first'; use one of layer_first, "),
    ({"radix_eviction_policy": "random"}, "radix_eviction_policy is 'random'; use one of lru, "),
    ({"hicache_storage_backend": "s3"}, "hicache_storage_backend is 's3'; use one of ray, file, mooncake, dynamic"),
    ({"hicache_storage_backend_extra_config": [1]}, r"extra_config is \[1\]; give text or a mapping"),
    ({"attention": "swa"}, "attention is 'swa': its pools .sliding-window layers beside full ones. have no host tier"),
    ({"attention": "mamba"}, "attention is 'mamba': its pools"),
    ({"attention": "gqa"}, "attention is 'gqa'; use one of mha, mla"),
    ({"collective_timeout": 0.0}, "collective_timeout is 0.0; it must be above 0"),
]


@pytest.mark.parametrize(
    "values, text", BAD_VALUES, ids=[f"{next(iter(v))}_{next(iter(v.values()))}" for v, _ in BAD_VALUES]
)
def test_a_bad_value_is_refused_with_what_would_work(values, text):
    with pytest.raises(ConfigError, match=text):
        HiCacheConfig(**values)


def test_case_61_an_integer_stands_for_a_float():
    config = HiCacheConfig(hicache_ratio=3, prefetch_timeout_base=2)
    assert type(config.hicache_ratio) is float and type(config.prefetch_timeout_base) is float


def test_from_mapping_reads_text_as_the_type_of_the_option():
    config = HiCacheConfig.from_mapping(
        {
            "page-size": "64",
            "hicache_ratio": "1.5",
            "enable-eagle": "true",
            "hicache_storage_backend": "file",
            "decode_attention_backend": "none",
            "tp_size": 2,
            "model_name": "none",
        }
    )
    assert (config.page_size, config.hicache_ratio, config.enable_eagle, config.tp_size) == (64, 1.5, True, 2)
    assert (config.hicache_storage_backend, config.decode_attention_backend) == ("file", None)
    assert config.model_name == "none"


@pytest.mark.parametrize(
    "values, text",
    [
        ({"hicache_sise": 1}, "unknown option 'hicache_sise'; did you mean hicache_size"),
        ({"zzz": 1}, "unknown option 'zzz'; `hicache-ray config explain` lists"),
        ({"page_size": "many"}, "page_size is 'many'; give a whole number"),
        ({"hicache_ratio": "2x"}, "hicache_ratio is '2x'; give a number"),
        ({"enable_eagle": "maybe"}, "enable_eagle is 'maybe'; give true or false"),
    ],
    ids=["near_name", "far_name", "integer", "float", "bool"],
)
def test_from_mapping_refuses(values, text):
    with pytest.raises(ConfigError, match=text):
        HiCacheConfig.from_mapping(values)


def test_from_mapping_takes_back_every_value():
    config = HiCacheConfig(page_size=16, hicache_storage_backend="ray", storage_actors=3, enable_eagle=True)
    assert HiCacheConfig.from_mapping(dataclasses.asdict(config)) == config
    assert (
        HiCacheConfig.from_mapping({name: str(value) for name, value in dataclasses.asdict(config).items()}) == config
    )


def test_a_config_is_frozen_and_travels():
    config = HiCacheConfig(hicache_storage_backend_extra_config={"a": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_names_registered_in_this_process_are_known(monkeypatch):
    monkeypatch.setattr("hicache_ray.config.names._registered", [])
    add_storage_backend("file")
    add_storage_backend("mine")
    assert HiCacheConfig(hicache_storage_backend="mine").hicache_storage_backend == "mine"
    with pytest.raises(ConfigError, match="use one of ray, file, mooncake, dynamic, mine"):
        HiCacheConfig(hicache_storage_backend="yours")


def test_parallel_shape_of_a_rank():
    config = HiCacheConfig(heads=8, tp_size=4, layers=10, pp_size=4, pp_rank=1)
    assert (config.attention_tp_size, config.local_heads, config.layer_range) == (4, 2, (3, 6))
    ranges = [dataclasses.replace(config, pp_rank=rank).layer_range for rank in range(4)]
    assert ranges == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert HiCacheConfig(heads=2, tp_size=8).local_heads == 1
    assert HiCacheConfig(attention="mla", tp_size=8).local_heads == 1


def test_identity_takes_every_part_of_the_configuration():
    config = HiCacheConfig(
        model_name="org/m", revision="r1", kv_cache_dtype="fp8_e4m3", page_size=64, hicache_mem_layout="page_first",
        enable_eagle=True, heads=8, head_dim=64, tp_size=2, layers=10, pp_size=2, pp_rank=1,
    )  # fmt: skip
    identity = config.identity(tp_rank=1)
    assert (identity.model, identity.revision, identity.kv_dtype) == ("org/m", "r1", "float8_e4m3fn")
    assert (identity.page_size, identity.layout, identity.key_mode) == (64, "page_first", "bigram")
    assert (identity.attention, identity.heads, identity.head_dim) == ("mha", 4, 64)
    assert (identity.tp_rank, identity.tp_size, identity.pp_rank, identity.pp_size) == (1, 2, 1, 2)
    assert (identity.layer_start, identity.layer_end) == (5, 10)
    assert config.identity(0).digest != identity.digest
    with pytest.raises(ConfigError, match="tp_rank is 2 of tp_size 2"):
        config.identity(2)


def test_identity_under_data_parallel_attention_counts_within_the_attention_group():
    config = HiCacheConfig(heads=8, tp_size=4, dp_size=2, enable_dp_attention=True)
    places = [(i.dp_rank, i.dp_size, i.tp_rank, i.tp_size) for i in map(config.identity, range(4))]
    assert places == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    assert config.local_heads == 4


def test_identity_of_plain_replicas_is_shared():
    assert HiCacheConfig(dp_size=4).identity() == HiCacheConfig().identity()


def test_identity_of_mla_has_the_latent_width_and_is_equal_on_all_ranks():
    config = HiCacheConfig(attention="mla", kv_lora_rank=512, qk_rope_head_dim=64, tp_size=2)
    assert (config.identity(0).heads, config.identity(0).head_dim) == (1, 576)
    assert config.identity(0).digest == config.identity(1).digest


def test_config_imports_neither_torch_nor_ray():
    code = "import sys, hicache_ray.config; sys.exit(bool({'torch', 'ray'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_option_has_one_type_that_text_can_be_read_as():
    for name, option in options_of(HiCacheConfig).items():
        assert len({int, float, bool, str} & set(option.types)) == 1, name
