"""Adjustments and refusals: cases 59, 60 and 61."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from hicache_ray.config import Adjustment, Capabilities, ConfigError, HiCacheConfig, explain

CPU = Capabilities()
CUDA = Capabilities(cuda=True, flashinfer=True)


def resolved(capabilities=CPU, **options):
    return HiCacheConfig(**options).resolve(capabilities)


def changes(capabilities=CPU, **options):
    return [(change.name, change.old, change.new) for change in resolved(capabilities, **options).adjustments]


IO, LAYOUT, DECODE = "hicache_io_backend", "hicache_mem_layout", "decode_attention_backend"

ADJUSTED = {
    "case_59_kernel_page_first_direct": (
        CPU,
        {IO: "kernel", LAYOUT: "page_first_direct"},
        [(IO, "kernel", "direct")],
    ),
    "case_59_kernel_page_first_direct_file": (
        CPU,
        {IO: "kernel", LAYOUT: "page_first_direct", "hicache_storage_backend": "file"},
        [(IO, "kernel", "direct")],
    ),
    "case_59_direct_page_first": (
        CPU,
        {IO: "direct", LAYOUT: "page_first"},
        [(LAYOUT, "page_first", "page_first_direct")],
    ),
    "case_59_mooncake_kernel": (
        CPU,
        {"hicache_storage_backend": "mooncake"},
        [(LAYOUT, "layer_first", "page_first")],
    ),
    "case_59_mooncake_direct": (
        CPU,
        {"hicache_storage_backend": "mooncake", IO: "direct"},
        [(LAYOUT, "layer_first", "page_first_direct")],
    ),
    "case_60_mha": (CUDA, {"attention_backend": "fa3"}, [(DECODE, None, "flashinfer")]),
    "case_60_mha_without_flashinfer": (
        Capabilities(cuda=True),
        {"attention_backend": "fa3"},
        [(DECODE, None, "triton")],
    ),
    "case_60_mla": (CUDA, {"attention_backend": "fa3", "attention": "mla"}, [(DECODE, None, "triton")]),
    "case_60_mla_on_sm100": (
        CUDA._replace(sm100=True),
        {"attention_backend": "fa3", "attention": "mla"},
        [(DECODE, None, "flashinfer")],
    ),
    "case_60_explicit": (CUDA, {DECODE: "fa3"}, [(IO, "kernel", "direct")]),
    "case_60_explicit_page_first": (
        CUDA,
        {DECODE: "fa3", LAYOUT: "page_first"},
        [(IO, "kernel", "direct"), (LAYOUT, "page_first", "page_first_direct")],
    ),
    "case_60_explicit_mooncake": (
        CUDA,
        {DECODE: "fa3", "hicache_storage_backend": "mooncake"},
        [(IO, "kernel", "direct"), (LAYOUT, "layer_first", "page_first_direct")],
    ),
    "npu_mha": (
        Capabilities(npu=True),
        {},
        [(IO, "kernel", "kernel_ascend"), (LAYOUT, "layer_first", "page_first_direct")],
    ),
    "npu_mla": (
        Capabilities(npu=True),
        {"attention": "mla", IO: "kernel_ascend"},
        [(LAYOUT, "layer_first", "page_first_kv_split")],
    ),
}


@pytest.mark.parametrize("capabilities, options, expected", ADJUSTED.values(), ids=ADJUSTED)
def test_adjustment(capabilities, options, expected, caplog):
    """Each with one warning that names the old and the new value; what is adjusted then resolves to itself."""
    with caplog.at_level(logging.WARNING, logger="hicache_ray.config"):
        config, adjustments = resolved(capabilities, **options)
    assert [(change.name, change.old, change.new) for change in adjustments] == expected
    assert all(getattr(config, name) == new for name, _, new in expected)
    assert len(caplog.records) == len(expected)
    for record, (name, old, new) in zip(caplog.records, expected, strict=True):
        for part in (name, old, new):
            assert ("none" if part is None else part) in record.getMessage()
    assert config.resolve(capabilities) == (config, [])


UNCHANGED = {
    "defaults": {},
    "kernel_page_first": {LAYOUT: "page_first"},
    "kernel_page_head": {LAYOUT: "page_head"},
    "direct_layer_first": {IO: "direct"},
    "direct_page_first_direct": {IO: "direct", LAYOUT: "page_first_direct"},
    "mooncake_page_first": {"hicache_storage_backend": "mooncake", LAYOUT: "page_first"},
    "file_layer_first": {"hicache_storage_backend": "file"},
    "case_60_attention_unset": {"attention_backend": None},
    "case_60_attention_triton": {"attention_backend": "triton"},
    "case_60_decode_triton": {"attention_backend": "fa3", DECODE: "triton"},
    "case_60_direct": {"attention_backend": "fa3", IO: "direct"},
    "l2_smaller_than_l1": {"hicache_ratio": 0.5},
}


@pytest.mark.parametrize("options", UNCHANGED.values(), ids=UNCHANGED)
def test_what_works_is_left_alone(options):
    assert changes(CUDA, **options) == []


REFUSED = {
    "case_59_direct_page_head": (
        CPU,
        {IO: "direct", LAYOUT: "page_head"},
        "direct can't move hicache_mem_layout page_head; with direct use layer_first or page_first_direct",
    ),
    "case_59_kernel_ascend_layer_first": (
        CPU,
        {IO: "kernel_ascend"},
        "kernel_ascend can't move hicache_mem_layout layer_first; with kernel_ascend use page_first_direct or ",
    ),
    "case_54_page_head_mla": (
        CPU,
        {LAYOUT: "page_head", "attention": "mla"},
        "page_head .* mla has none; use page_first",
    ),
    "kernel_ascend_without_npu": (
        CPU,
        {IO: "kernel_ascend", LAYOUT: "page_first_direct"},
        "kernel_ascend needs an NPU, device is cpu",
    ),
    "mla_kv_split_with_a_store": (
        Capabilities(npu=True),
        {"attention": "mla", LAYOUT: "page_first_kv_split", IO: "kernel_ascend", "hicache_storage_backend": "ray"},
        "two parts of different size, which no storage backend takes; use page_first_direct",
    ),
    "kernel_kv_split": (
        CPU,
        {LAYOUT: "page_first_kv_split"},
        "kernel can't move hicache_mem_layout page_first_kv_split",
    ),
    "disable_radix_cache": (CPU, {"disable_radix_cache": True}, "disable_radix_cache is true: .* leave it false"),
    "no_hierarchical_cache": (CPU, {"enable_hierarchical_cache": False}, "enable_hierarchical_cache is false"),
    "cuda_absent": (CPU, {"device": "cuda"}, "device is cuda, but torch sees no CUDA device here; use cpu or auto"),
    "npu_absent": (CPU, {"device": "npu"}, "device is npu"),
    "nccl_without_cuda": (CPU, {"collective_backend": "nccl"}, "collective_backend is nccl"),
    "l1_below_a_page": (CPU, {"l1_tokens": 63, "page_size": 64}, "l1_tokens is 63: no page of page_size 64 fits"),
    "pp_rank": (CPU, {"pp_rank": 2, "pp_size": 2}, "pp_rank is 2 of pp_size 2"),
    "pp_size": (CPU, {"pp_size": 3, "layers": 2}, "pp_size is 3 for 2 layers"),
    "dp_attention": (CPU, {"tp_size": 3, "dp_size": 2, "enable_dp_attention": True}, "tp_size 3 into dp_size 2"),
    "heads": (CPU, {"heads": 6, "tp_size": 4}, "heads is 6 for 4 tensor-parallel ranks"),
    "replicas": (CPU, {"storage_replicas": 2}, "storage_replicas is 2, but storage_actors is 1"),
    "timeouts": (CPU, {"step_timeout": 5.0}, "step_timeout is 5 s, collective_timeout 5 s"),
    "case_9_sglang_keys_with_pipeline": (
        CPU,
        {
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": {"key_style": "sglang"},
            "pp_size": 2,
        },
        "key_style sglang of the file backend has no pipeline stage",
    ),
    "dynamic_without_class": (
        CPU,
        {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": {"backend_name": "x"}},
        "dynamic needs module_path, class_name",
    ),
}


@pytest.mark.parametrize("capabilities, options, text", REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(capabilities, options, text):
    with pytest.raises(ConfigError, match=text):
        resolved(capabilities, **options)


@pytest.mark.parametrize(
    "capabilities, device",
    [(CPU, "cpu"), (CUDA, "cuda"), (Capabilities(npu=True), "npu"), (Capabilities(cuda=True, npu=True), "cuda")],
)
def test_auto_takes_an_accelerator_where_there_is_one(capabilities, device):
    assert resolved(capabilities).config.device == device


FORMATS = {
    ".json": '{"path": "/x", "depth": 2, "prefetch_threshold": 64}',
    ".toml": 'path = "/x"\ndepth = 2\nprefetch_threshold = 64\n',
    ".yaml": "path: /x\ndepth: 2\nprefetch_threshold: 64\n",
    ".yml": "{path: /x, depth: 2, prefetch_threshold: 64}",
}


@pytest.mark.parametrize("suffix", FORMATS, ids=[f"case_61_{suffix[1:]}" for suffix in FORMATS])
def test_extra_config_file(suffix, tmp_path):
    file = tmp_path / f"extra{suffix}"
    file.write_text(FORMATS[suffix])
    config = resolved(hicache_storage_backend_extra_config=f"@{file}").config
    assert config.hicache_storage_backend_extra_config == {"path": "/x", "depth": 2}
    assert config.prefetch_threshold == 64


def test_case_61_extra_config_text_and_mapping():
    values = {
        "a": [1],
        "prefetch_timeout_base": 2,
        "prefetch_timeout_per_ki_token": 0.5,
        "hicache_storage_pass_prefix_keys": True,
    }
    for given in (values, json.dumps(values), f"  {json.dumps(values)}\n"):
        config = resolved(hicache_storage_backend_extra_config=given).config
        assert config.hicache_storage_backend_extra_config == {"a": [1]}
        assert (config.prefetch_timeout_base, config.prefetch_timeout_per_ki_token) == (2.0, 0.5)
        assert config.hicache_storage_pass_prefix_keys is True
    assert values["prefetch_timeout_base"] == 2
    for nothing in (None, "", "{}"):
        assert resolved(hicache_storage_backend_extra_config=nothing).config.hicache_storage_backend_extra_config == {}


BAD_EXTRA = {
    "bad_json": ("{", "is no JSON"),
    "no_mapping": ("[1]", "holds a list; give a mapping"),
    "missing_file": ("@/nonexistent/x.json", "'/nonexistent/x.json' can't be read: No such file"),
    "unknown_extension": ("@x.ini", "'x.ini'; its name must end in .json, .toml, .yaml, .yml"),
    "wrong_type": ('{"prefetch_threshold": "many"}', "prefetch_threshold is 'many'; give a whole number"),
    "wrong_bool": ('{"hicache_storage_pass_prefix_keys": 1}', "hicache_storage_pass_prefix_keys is 1; give true"),
    "key_no_text": ({1: 2}, "the key 1; keys must be text"),
}


@pytest.mark.parametrize("extra, text", BAD_EXTRA.values(), ids=[f"case_61_{name}" for name in BAD_EXTRA])
def test_bad_extra_config_is_refused(extra, text):
    with pytest.raises(ConfigError, match=text):
        resolved(hicache_storage_backend_extra_config=extra)


@pytest.mark.parametrize("suffix, text", [(".json", "{"), (".toml", "= 1"), (".yaml", "a: [")])
def test_case_61_a_file_that_does_not_parse_is_refused(suffix, text, tmp_path):
    file = tmp_path / f"extra{suffix}"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"extra{suffix}' is no {suffix[1:].upper()}"):
        resolved(hicache_storage_backend_extra_config=f"@{file}")


def test_an_option_given_twice_must_agree():
    extra = '{"prefetch_threshold": 64}'
    assert resolved(prefetch_threshold=64, hicache_storage_backend_extra_config=extra).config.prefetch_threshold == 64
    with pytest.raises(ConfigError, match="prefetch_threshold is 32, and 64 in .*; give it only once"):
        resolved(prefetch_threshold=32, hicache_storage_backend_extra_config=extra)


def test_explain_gives_one_line_per_option_and_says_why(caplog):
    config = HiCacheConfig(
        hicache_mem_layout="page_first_direct", page_size=64, prefetch_threshold=10, hicache_size=1,
        hicache_storage_backend="file", hicache_storage_backend_extra_config='{"b": 1, "a": 2}',
    )  # fmt: skip
    lines = dict(line.split(" = ", 1) for line in explain(config, CPU))
    assert list(lines) == [field.name for field in dataclasses.fields(HiCacheConfig)]
    assert lines["hicache_io_backend"].startswith("direct  # adjusted from kernel: the kernel backend can't move")
    assert lines["hicache_mem_layout"] == "page_first_direct  # given"
    assert lines["hicache_write_policy"] == "write_through  # default"
    assert lines["prefetch_threshold"] == "10  # given, holds as 64: at least one page"
    assert lines["hicache_ratio"] == "2.0  # default, unused: hicache_size is set"
    assert lines["device"] == "cpu  # default, auto"
    assert lines["decode_attention_backend"] == "none  # default"
    assert lines["hicache_storage_backend_extra_config"] == '{"a": 2, "b": 1}  # given'
    assert lines["model_name"].startswith("''  # default, empty: models of the same shape")
    assert not caplog.records


def test_detect_runs_on_this_machine():
    found = Capabilities.detect()
    assert all(isinstance(flag, bool) for flag in found)
    assert HiCacheConfig().resolve().config.device in ("cpu", "cuda", "npu")


def test_an_adjustment_reads_as_a_sentence():
    change = Adjustment("decode_attention_backend", None, "triton", "fa3 does not work here")
    assert str(change) == "decode_attention_backend is triton instead of none: fa3 does not work here"
