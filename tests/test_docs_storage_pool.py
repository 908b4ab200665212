"""docs/storage-pool.md: its programs run, in order, on a Ray cluster; its tables name the options that there are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ray.actors.storage_pool import StoragePoolConfig
from hicache_ray.storage.pool.membership import MOST_CHANGES
from hicache_ray.storage.pool.rebalance_plan import RebalanceOptions
from hicache_ray.storage.shard.layout import CELL_ALIGNMENT, CELL_HEADER, MIN_CELL_BYTES, ArenaGeometry
from tests.cluster import shared_cluster

pytestmark = [pytest.mark.ray]

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "storage-pool.md").read_text()


@pytest.fixture
def cluster() -> Iterator[None]:
    with shared_cluster():
        yield


def table(first: str) -> dict[str, str]:
    """Options and their defaults, of the table that begins with an option of that name."""
    rows = re.findall(rf"\| `{first}` \|.*?(?:\n\n|\Z)", TEXT, re.DOTALL)[0].strip().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0].strip("`"): row[1] for row in cells}


def test_the_programs_run(cluster: None) -> None:
    programs = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(programs) == 7
    scope: dict[str, object] = {"__name__": "docs_storage_pool"}
    for program in programs:
        exec(compile(program, "docs/storage-pool.md", "exec"), scope)


def test_tables_name_all_options() -> None:
    assert list(table("name")) == [field.name for field in dataclasses.fields(StoragePoolConfig)]
    said = table("bytes_per_second")
    assert list(said) == [field.name for field in dataclasses.fields(RebalanceOptions)]
    assert {name: value for name, value in said.items() if value.isdigit()} == {
        name: f"{value:g}"
        for name, value in vars(RebalanceOptions()).items()
        if name not in ("bytes_per_second", "transport")
    }
    assert RebalanceOptions().bytes_per_second == 256 << 20


def test_numbers() -> None:
    assert CELL_HEADER.itemsize == 192 and CELL_ALIGNMENT == 64 and MIN_CELL_BYTES == 1024
    assert MOST_CHANGES == 4 and ArenaGeometry.of(1 << 30).segment_bytes == 64 << 20
