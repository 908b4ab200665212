"""Every cell of the copy table equals the plain reference, byte for byte."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from hicache_ray.kernels import cpu
from hicache_ray.kernels.ascend import NpuCopies
from hicache_ray.kernels.cuda import StreamCopies
from hicache_ray.kernels.table import copies_between
from tests.kernels_matrix import CELLS, Cell, MakeCopies, check, shapes

CHECKED: Counter[tuple[Cell, str]] = Counter()

WAYS = {"kernel": ("fallback",), "direct": ("runs", "scattered", "stream"), "kernel_ascend": ("exchange",)}
"""The ways a backend's bytes go: numpy by runs or by single pages, piece by piece as a DMA engine does, dims exchanged.
The kernel cells are checked on their Triton way in test_kernels_triton."""


@pytest.mark.parametrize(
    ("cell", "way"),
    [(cell, way) for cell in CELLS for way in WAYS[cell[0]]],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_cell_equals_the_reference(cell: Cell, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make: MakeCopies = {"stream": StreamCopies, "exchange": NpuCopies}.get(way, partial(copies_between, cell[0]))
    if way in ("runs", "scattered"):
        monkeypatch.setattr(cpu, "SMALL_RUN", 0 if way == "runs" else 1 << 60)
    for shape in shapes(cell[2]):
        check(make, cell[1], shape)
        CHECKED[cell, way] += 1


def test_number_of_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what the matrix covered: the tests above that ran before this one."""
    with capsys.disabled():
        print(f"\n{CHECKED.total()} combinations in {len({cell for cell, _ in CHECKED})} cells")
    for (cell, _), count in CHECKED.items():
        assert count == {"mha": 64, "mla": 32}[cell[2]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[0] != "kernel_ascend"], ids="-".join)
def test_cell_equals_the_reference_on_cuda(cell: Cell) -> None:
    for shape in shapes(cell[2]):
        check(partial(copies_between, cell[0]), cell[1], shape, device="cuda")
