"""Every cell of the copy table equals the plain reference, byte for byte."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hicache_ray.kernels import host_copy, stream_copy
from hicache_ray.kernels.dispatch import TABLE, Cell, Operators, TableTransfer
from tests.kernels_matrix import check, shapes

CHECKED: Counter[tuple[Cell, str]] = Counter()

WAYS = {"kernel": ("fallback",), "direct": ("runs", "scattered", "stream"), "kernel_ascend": ("exchange",)}
"""The ways a backend's bytes go: numpy by runs or by single pages, piece by piece as a DMA engine does, dims exchanged.
The kernel cells are checked on their Triton way in test_kernels_triton."""


@pytest.mark.parametrize(
    ("cell", "way"),
    [(cell, way) for cell in TABLE for way in WAYS[cell[0]]],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_cell_equals_the_reference(cell: Cell, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = TABLE[cell]
    if way in ("runs", "scattered"):
        monkeypatch.setattr(host_copy, "SMALL_RUN", 0 if way == "runs" else 1 << 60)
    if way == "stream":
        operators = Operators(operators.order, stream_copy.load_layer, stream_copy.backup)
    for shape in shapes(cell[2]):
        check(TableTransfer(cell[1], operators), shape)
        CHECKED[cell, way] += 1


def test_number_of_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what the matrix covered: the tests above that ran before this one."""
    with capsys.disabled():
        print(f"\n{CHECKED.total()} combinations in {len({cell for cell, _ in CHECKED})} cells")
    assert set(CHECKED.values()) <= {64, 32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("cell", [cell for cell in TABLE if cell[0] != "kernel_ascend"], ids="-".join)
def test_cell_equals_the_reference_on_cuda(cell: Cell) -> None:
    for shape in shapes(cell[2]):
        check(TableTransfer(cell[1], TABLE[cell]), shape, device="cuda")
