"""Host layouts: shapes (case 55), pointers (case 54), byte order (case 56), segments."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from hicache_ray.pages import pages_of, slots_of
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import ORDERS, KVSpec

MHA = KVSpec.mha(layers=3, heads=2, head_dim=4, dtype="fp32")
MLA = KVSpec.mla(layers=3, kv_lora_rank=6, qk_rope_head_dim=2, dtype="fp16")
PAGES, PAGE_SIZE = 9, 2
SLOTS = [4, 5, 0, 1]
CELLS = [(spec, layout) for spec in (MHA, MLA) for layout in ORDERS if (spec, layout) != (MLA, "page_head")]


def pool(spec: KVSpec, layout: str) -> HostPool:
    return HostPool(spec, PAGES, PAGE_SIZE, layout, pin=False)


def random_pool(spec: KVSpec, layout: str) -> HostPool:
    made = pool(spec, layout)
    made.buffer[:] = np.random.default_rng(55).integers(0, 256, made.buffer.size, dtype=np.uint8)
    return made


@pytest.mark.parametrize(
    ("spec", "layout", "shape"),
    [
        (MHA, "layer_first", (2, 3, 18, 2, 4)),
        (MHA, "page_first", (2, 18, 3, 2, 4)),
        (MHA, "page_first_direct", (2, 9, 3, 2, 2, 4)),
        (MHA, "page_head", (2, 9, 2, 2, 3, 4)),
        (MHA, "page_first_kv_split", (2, 9, 3, 2, 2, 4)),
        (MLA, "layer_first", (3, 18, 1, 8)),
        (MLA, "page_first", (18, 3, 1, 8)),
        (MLA, "page_first_direct", (9, 3, 2, 1, 8)),
    ],
)
def test_case_55_shapes(spec: KVSpec, layout: str, shape: tuple[int, ...]) -> None:
    made = pool(spec, layout)
    assert made.geometry.shape == shape
    assert made.kv_buffer.shape == shape
    assert made.kv_buffer.dtype == spec.dtype
    assert made.kv_buffer.data_ptr() == made.buffer.ctypes.data


def test_kv_split_keeps_two_buffers() -> None:
    made = pool(MLA, "page_first_kv_split")
    assert made.k_buffer.shape == (9, 3, 2, 1, 6)
    assert made.v_buffer.shape == (9, 3, 2, 1, 2)
    assert made.k_buffer.is_contiguous() and made.v_buffer.is_contiguous()
    with pytest.raises(ValueError, match="different widths"):
        _ = made.geometry.shape
    mha = pool(MHA, "page_first_kv_split")
    assert mha.k_buffer.shape == mha.v_buffer.shape == (9, 3, 2, 2, 4)


@pytest.mark.parametrize(
    ("spec", "layout", "offsets", "size"),
    [
        (MHA, "layer_first", [128, 1856, 704, 2432, 1280, 3008, 0, 1728, 576, 2304, 1152, 2880], 64),
        (MHA, "page_first", [384, 2112, 0, 1728], 192),
        (MHA, "page_first_direct", [384, 2112, 0, 1728], 192),
        (MHA, "page_head", [384, 2112, 0, 1728], 192),
        (MLA, "layer_first", [64, 352, 640, 0, 288, 576], 32),
        (MLA, "page_first", [192, 0], 96),
        (MLA, "page_first_direct", [192, 0], 96),
    ],
)
def test_case_54_pointers(spec: KVSpec, layout: str, offsets: list[int], size: int) -> None:
    made = pool(spec, layout)
    pointers, sizes = made.get_page_buffer_meta(SLOTS)
    assert [pointer - made.buffer.ctypes.data for pointer in pointers] == offsets
    assert sizes == [size] * len(offsets)


def test_case_54_pointers_of_split_buffers() -> None:
    made = pool(MLA, "page_first_kv_split")
    pointers, sizes = made.get_page_buffer_meta(SLOTS)
    assert sizes == [72, 24, 72, 24]
    bases = [made.k_buffer.data_ptr(), made.v_buffer.data_ptr()]
    assert pointers == [bases[0] + 2 * 72, bases[1] + 2 * 24, bases[0], bases[1]]


@pytest.mark.parametrize("slots", [[4, 5, 0], [1, 2], [4, 6], [5, 4]])
def test_case_54_slots_that_are_not_whole_pages(slots: list[int]) -> None:
    with pytest.raises(ValueError, match="page"):
        pool(MHA, "page_first").get_page_buffer_meta(slots)


def test_case_54_slots_outside_the_pool() -> None:
    with pytest.raises(ValueError, match="pool of 9 pages"):
        pool(MHA, "page_first").get_page_buffer_meta([18, 19])


def test_case_54_mla_has_no_page_head() -> None:
    with pytest.raises(ValueError, match="page_head"):
        pool(MLA, "page_head")


def test_unknown_layout_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'layer_last'.*page_first_direct"):
        pool(MHA, "layer_last")


def test_split_latent_needs_its_widths() -> None:
    with pytest.raises(ValueError, match="rope_dim"):
        HostPool(KVSpec("mla", 3, latent_dim=8), 2, 2, "page_first_kv_split")


@pytest.mark.parametrize(("spec", "layout"), CELLS)
def test_pages_read_as_their_pointers_say(spec: KVSpec, layout: str) -> None:
    made = random_pool(spec, layout)
    for page in range(PAGES):
        pointers, sizes = made.get_page_buffer_meta(slots_of([page], PAGE_SIZE))
        expected = b"".join(ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True))
        assert len(expected) == made.page_bytes == spec.token_bytes * PAGE_SIZE
        assert bytes(made.read_page(page)) == expected


@pytest.mark.parametrize(("spec", "layout"), [cell for cell in CELLS if cell != (MLA, "page_first_kv_split")])
def test_segments_are_the_pages_in_pointer_order_without_a_copy(spec: KVSpec, layout: str) -> None:
    made = random_pool(spec, layout)
    assert made.segments.shape[0] == PAGES
    for page in range(PAGES):
        assert made.segments[page].tobytes() == bytes(made.read_page(page))
    made.segments[3] = 7
    assert set(made.read_page(3).tolist()) == {7}
    assert 7 * made.page_bytes != made.read_page(2).sum()


def test_split_latent_has_no_common_segment() -> None:
    with pytest.raises(ValueError, match="read_page"):
        _ = pool(MLA, "page_first_kv_split").segments


@pytest.mark.parametrize(("spec", "layout"), CELLS)
def test_written_page_reads_back_and_touches_no_other(spec: KVSpec, layout: str) -> None:
    made = random_pool(spec, layout)
    before = [bytes(made.read_page(page)) for page in range(PAGES)]
    data = np.random.default_rng(1).integers(0, 256, made.page_bytes, dtype=np.uint8)
    made.write_page(5, data)
    after = [bytes(made.read_page(page)) for page in range(PAGES)]
    assert after == [*before[:5], data.tobytes(), *before[6:]]


def test_page_calls_check_what_they_are_given() -> None:
    made = pool(MHA, "page_first")
    with pytest.raises(ValueError, match="has 384 bytes, not 3"):
        made.write_page(0, b"abc")
    for page in (-1, 9):
        with pytest.raises(ValueError, match="pool of 9 pages"):
            made.read_page(page)


@pytest.mark.parametrize(("spec", "layout"), CELLS)
def test_part_views_address_the_shaped_buffer(spec: KVSpec, layout: str) -> None:
    """part_views[part][layer, page, token, head] is the element the shape of case 55 has there."""
    made = random_pool(spec, layout)
    layer, page, token, head = 2, 4, 1, spec.heads - 1
    slot = page * PAGE_SIZE + token
    at = {
        "layer_first": (layer, slot, head),
        "page_first": (slot, layer, head),
        "page_first_direct": (page, layer, token, head),
        "page_head": (page, head, token, layer),
        "page_first_kv_split": (page, layer, token, head),
    }[layout]
    buffers = [made.k_buffer, made.v_buffer] if len(made.part_views) == 2 else [made.k_buffer]
    for buffer, view in zip(buffers, made.part_views, strict=True):
        expected = bytes(buffer[at].view(torch.uint8).tolist())
        assert view[layer, page, token, head].tobytes() == expected


def order_of(spec: KVSpec, layout: str) -> str:
    return pool(spec, layout).geometry.byte_order


def test_case_56_byte_order_tells_layouts_of_equal_size_apart() -> None:
    assert {layout: order_of(MHA, layout) for layout in ORDERS} == {
        "layer_first": "layer.kv.token.head",
        "page_first": "kv.token.layer.head",
        "page_first_direct": "kv.layer.token.head",
        "page_head": "kv.head.token.layer",
        "page_first_kv_split": "kv.layer.token.head",
    }
    assert order_of(MLA, "page_first_direct") == order_of(MLA, "layer_first") == "layer.token"
    assert order_of(MLA, "page_first_kv_split") == "part.layer.token"


@pytest.mark.parametrize("spec", [MHA, MLA])
def test_case_56_equal_order_means_equal_bytes(spec: KVSpec) -> None:
    """Two pools that hold the same KV have the same page bytes exactly where their byte orders are equal."""
    layouts = [layout for layout in ORDERS if (spec, layout) != (MLA, "page_head")]
    values = np.random.default_rng(56).integers(0, 256, (2, spec.layers, PAGES, PAGE_SIZE, spec.heads, 64), np.uint8)
    pages = {}
    for layout in layouts:
        made = pool(spec, layout)
        for placed, view in zip(made.geometry.parts, made.part_views, strict=True):
            part = placed.part
            view[...] = values[part.plane][..., part.start * spec.itemsize : part.stop * spec.itemsize]
        pages[layout] = (made.geometry.byte_order, bytes(made.read_page(1)))
    for order, data in pages.values():
        for other_order, other_data in pages.values():
            assert (order == other_order) == (data == other_data)


def test_slots_and_pages_are_inverse() -> None:
    pages = np.array([4, 0, 17])
    assert slots_of(pages, 3).tolist() == [12, 13, 14, 0, 1, 2, 51, 52, 53]
    assert pages_of(slots_of(pages, 3), 3).tolist() == pages.tolist()
    assert slots_of([], 3).size == pages_of([], 3).size == 0
