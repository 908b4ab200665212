"""The names that options take as values, and the table of copies between L1 and L2."""

from __future__ import annotations

from collections.abc import Mapping

UNSUPPORTED_ATTENTION: Mapping[str, str] = {
    "swa": "sliding-window layers beside full ones",
    "mamba": "state-space layers beside full ones",
}
"""Kinds of attention that are refused, and the layers that their pools are for."""

KV_DTYPES: dict[str, str] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""KV cache dtypes, and what torch calls them."""

DEVICES = ("auto", "cpu", "cuda", "npu")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
COLLECTIVE_BACKENDS = ("hicache", "gloo", "nccl")
KV_EVENT_ENCODINGS = ("array", "map")

STORAGE_BACKENDS = ("ray", "file", "mooncake", "dynamic")
"""The storage backends of this package; the registry of storage adds those that others register."""

_registered: list[str] = []


def storage_backends() -> tuple[str, ...]:
    """Names that `hicache_storage_backend` takes: the package's own and those registered in this process."""
    return (*STORAGE_BACKENDS, *_registered)


def add_storage_backend(name: str) -> None:
    """Makes a name known; what makes the backend is told to `storage.registry.register_backend`, which calls this."""
    if name not in storage_backends():
        _registered.append(name)


MEM_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_first_kv_split")
"""Orders of bytes in L2 and in L3 (docs/layouts.md)."""

COPIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "kernel": {"layer_first": ("mha", "mla"), "page_first": ("mha", "mla"), "page_head": ("mha",)},
    "direct": {"layer_first": ("mha", "mla"), "page_first_direct": ("mha", "mla"), "page_first": ("mha", "mla")},
    "kernel_ascend": {"page_first_direct": ("mha", "mla"), "page_first_kv_split": ("mha", "mla")},
}
"""The copies between L1 and L2 that there are: I/O backend -> layout -> kinds of attention. No other combination is."""

IO_BACKENDS = tuple(COPIES)

REPLACED_LAYOUTS: Mapping[tuple[str, str], str] = {("direct", "page_first"): "page_first_direct"}
"""Layouts that an I/O backend moves only token by token, and the one that a configuration gets instead (case 59)."""


def can_copy(io_backend: str, layout: str, attention: str) -> bool:
    """Whether there are copies between L1 and L2 for this combination."""
    return attention in COPIES.get(io_backend, {}).get(layout, ())


def layouts_of(io_backend: str) -> tuple[str, ...]:
    """The layouts that a configuration may have with an I/O backend."""
    return tuple(layout for layout in COPIES[io_backend] if (io_backend, layout) not in REPLACED_LAYOUTS)
